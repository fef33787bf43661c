"""WHERE it is computed: mesh, plans, tensor and pipeline parallelism, FSDP2, recompute, compile."""
