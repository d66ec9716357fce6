"""Speed, memory and parts of a whole training step of real models' shapes."""
