"""Models that torch holds on several ranks: fully_shard and DistributedDataParallel."""
