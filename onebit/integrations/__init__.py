"""Into the training that people have: DistributedDataParallel, Hugging Face, Lightning."""
