"""Adapters that turn a trainer's own tensors into `LocalTensor`s."""
