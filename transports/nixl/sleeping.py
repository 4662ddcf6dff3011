"""How long may the progress thread of an idle NIXL agent sleep?  NIXL's own answer is: not at all.

NIXL's progress thread waits for events for at most ``pthrDelay`` microseconds at a time. The Python wrapper (1.5.1)
writes 0 into every agent's configuration, and takes no argument for it, so that the thread of an idle agent spins: a
whole processor for each trainer, while it trains.  `agent_class` returns the wrapper's class with a constructor of the
same code that sees another configuration class:

1. a subclass of the native configuration whose ``pthrDelay`` is ours, whatever is written to it;
2. the wrapper's constructor over a copy of its module's names, in which the configuration class is that one;
3. a subclass of the wrapper with that constructor.

Nothing of NIXL is changed: other agents of the process are made as ever.
"""

from __future__ import annotations

import importlib
from logging import getLogger
from types import FunctionType, ModuleType, SimpleNamespace

logger = getLogger(__name__)

_BINDINGS, _CONFIG, _DELAY = "nixlBind", "nixlAgentConfig", "pthrDelay"


def agent_class(nixl: ModuleType, sleep_us: int) -> type:
    """Return a class of agents whose progress thread sleeps.

    Parameters
    ----------
    nixl : module
        The package, such as `reshard.transports.nixl.library.load` returns.
    sleep_us : int
        How long it may sleep where no event comes, in microseconds; NIXL rounds up to milliseconds.

    Returns
    -------
    type
        A subclass of ``nixl.nixl_agent``; that class itself if this NIXL is built otherwise than is known here.
    """
    original: type = nixl.nixl_agent
    api = importlib.import_module(f"{nixl.__name__}._api")
    bindings = getattr(api, _BINDINGS, None)
    config = getattr(bindings, _CONFIG, None)
    delay = getattr(config, _DELAY, None)
    store = getattr(delay, "fset", None)
    construct = vars(original).get("__init__")
    if not (isinstance(config, type) and callable(store) and isinstance(construct, FunctionType)):
        logger.warning("%s: its agents cannot be told to sleep, and keep a processor busy", nixl.__name__)
        return original

    def configured(self: object, *arguments: object, **named: object) -> None:
        config.__init__(self, *arguments, **named)  # type: ignore[misc]
        store(self, sleep_us)

    kept = property(getattr(delay, "fget", None), lambda *_: None)
    sleeping = type("SleepingConfig", (config,), {"__init__": configured, _DELAY: kept})
    names = {**vars(api), _BINDINGS: SimpleNamespace(**{**vars(bindings), _CONFIG: sleeping})}
    copy = FunctionType(construct.__code__, names, "__init__", construct.__defaults__, construct.__closure__)
    copy.__kwdefaults__ = construct.__kwdefaults__
    return type("SleepingAgent", (original,), {"__init__": copy})
