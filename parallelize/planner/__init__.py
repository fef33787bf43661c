"""Predicts memory and time of a layout, and searches for the best. Sees a model as numbers, never as classes."""
