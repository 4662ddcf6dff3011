"""The planner: shard tables and read tables in, plan out. NumPy only; no I/O, no clock, no environment."""
