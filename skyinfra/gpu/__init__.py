"""GPUs of a node: NVML, the inventory, the desired and the actual layout, and the partitioner between them."""
