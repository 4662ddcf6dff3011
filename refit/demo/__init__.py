"""The demo: a real sharded trainer, a real sharded inference layout, three refits, and every byte compared.

`reshard.refit.demo.run.run_demo` is the whole of it; the other modules are its processes and its checks.
"""
