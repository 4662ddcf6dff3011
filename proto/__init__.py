"""The protocol of the rendezvous: ``v1/*.proto`` and the modules generated from them (``make proto``)."""
