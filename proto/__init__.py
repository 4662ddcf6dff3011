"""The protocol of the rendezvous: ``v1/*.proto`` and the modules generated from them (``make proto``)."""

try:
    import google.protobuf  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "reshard.proto needs 'protobuf', which is not installed: pip install 'reshard[rendezvous]'", name=error.name
    ) from error
