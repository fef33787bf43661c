"""When Python collects its cyclic garbage: on every rank at the same step, so that no rank makes the others wait."""

import gc


class Garbage:
    """Switches automatic collection off and collects every ``interval`` steps; 0 leaves it to Python."""

    def __init__(self, interval: int):
        self._interval = interval
        if interval:
            gc.collect()
            gc.freeze()  # modules and model stay: looking at them again and again is most of a collection's time
            gc.disable()

    def after(self, step: int) -> None:
        if self._interval and step % self._interval == 0:
            gc.collect()

    def close(self) -> None:
        if self._interval:
            gc.unfreeze()
            gc.enable()
