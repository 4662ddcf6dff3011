"""Engine adapters: `arrays` (NumPy), `loader` (anything with load_weights), `torch_module`, `vllm`."""
