"""Bad luck: failing networks, interrupts, memory that runs out, broken data and checkpoints, many threads."""
