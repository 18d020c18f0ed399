"""The parts of the model. Each takes its sizes and the TP group in the constructor and holds only its own shard."""
