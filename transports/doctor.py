"""Which transports work here, why not, what they use, and how fast they are: the library half of ``reshard doctor``.

`examine` answers with data, `render` puts it in words. Nothing is changed, and nothing is assumed: a backend that fails
while it is measured is reported with its error, and the others go on.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import resource
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from reshard.planner.errors import ReshardError
from reshard.planner.options import CostModel
from reshard.transports.base import check_timeout
from reshard.transports.choice import Choice, choose, look
from reshard.transports.errors import TransportError
from reshard.transports.probing import Rates, measure, measure_copy
from reshard.transports.registry import Availability, available

LEAST_TIMEOUT_S = 1.0
_INFINIBAND = Path("/sys/class/infiniband")
_PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")
_HURTS: Mapping[str, str] = {"UCX_RNDV_THRESH": "inf"}
"""``UCX_*`` variables that make UCX emulate reads unless they have this value."""


@dataclass(frozen=True, slots=True)
class HostReport:
    """What the backends find on this host.

    Attributes
    ----------
    n_cpus : int
        Processors that this process may run on.
    memlock_bytes : int
        Memory that it may lock, which RDMA registration needs; -1 for no limit.
    ptrace_scope : int
        0 if processes of one user may read each other's memory (CMA), more if Yama restricts it, -1 without Yama.
    nics : tuple of str
        RDMA ports, such as ``"mlx5_0 port 1: ACTIVE, 400 Gb/sec (4X NDR)"``.
    copy_bytes_per_s : float
        Strided copy in this process; 0.0 if not measured.
    """

    n_cpus: int
    memlock_bytes: int
    ptrace_scope: int
    nics: tuple[str, ...]
    copy_bytes_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class BackendReport:
    """One backend.

    Attributes
    ----------
    name : str
    ok : bool
        Whether it works, as far as it was tried.
    reason : str
        Why not.
    version : str
        Of the native library, empty if there is none.
    details, warnings : tuple of str
        What it uses; what is slower or riskier than it need be, and what to do about it.
    rates : Rates or None
        Measured on this host.
    """

    name: str
    ok: bool
    reason: str = ""
    version: str = ""
    details: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    rates: Rates | None = None


@dataclass(frozen=True, slots=True)
class DoctorReport:
    """Outcome of `examine`; ``auto`` is what ``open_transport("auto")`` takes here, and why."""

    host: HostReport
    backends: tuple[BackendReport, ...]
    auto: Choice

    def backend(self, name: str) -> BackendReport:
        """Return one backend's report.

        Raises
        ------
        KeyError
            If there is none.
        """
        for found in self.backends:
            if found.name == name:
                return found
        raise KeyError(f"no backend {name!r} in the report, which has {', '.join(b.name for b in self.backends)}")

    def as_dict(self) -> dict[str, object]:
        """Return it as plain dictionaries, tuples and numbers, for JSON."""
        return asdict(self)


def examine(measured: bool = True, nbytes: int = 64 << 20, timeout_s: float = 60.0) -> DoctorReport:
    """Probe every backend and, if asked, measure those that work.

    Parameters
    ----------
    measured : bool
        Whether to measure; it starts one process for each backend.
    nbytes : int
        Memory to read; see `measure`.
    timeout_s : float
        For each backend; finite, over 0.
    """
    check_timeout(timeout_s)
    host = _host()
    if measured:
        host = replace(host, copy_bytes_per_s=measure_copy(nbytes))
    rows = available()
    found = {row.name: row.reason for row in rows}
    auto = choose(look(_INFINIBAND), lambda name: found.get(name, "there is no such transport"))
    return DoctorReport(host, tuple(_examine(row, host, measured, nbytes, timeout_s) for row in rows), auto)


def cost_model(report: DoctorReport, name: str) -> CostModel:
    """Return what the planner needs to know of a backend that was measured.

    Raises
    ------
    KeyError
        If there is no such backend.
    ValueError
        If it was not measured.
    """
    found = report.backend(name)
    if found.rates is None or report.host.copy_bytes_per_s <= 0:
        raise ValueError(f"backend {name!r} was not measured: {found.reason or 'examine(measured=True) does'}")
    return CostModel(found.rates.descriptor_s, found.rates.bytes_per_s, report.host.copy_bytes_per_s)


def render(report: DoctorReport) -> str:
    """Return the report as lines of text."""
    host = report.host
    memlock = "unlimited" if host.memlock_bytes < 0 else f"{host.memlock_bytes} bytes"
    lines = [
        f"host      {host.n_cpus} processors; locked memory: {memlock}; {_cma_words(host.ptrace_scope)}",
        *(f"          {nic}" for nic in host.nics or ("no RDMA device",)),
    ]
    if host.copy_bytes_per_s:
        lines.append(f"          strided copy {host.copy_bytes_per_s / 1e9:.2f} GB/s")
    for found in report.backends:
        state = "ok" if found.ok else "does not work here"
        lines.append(f"{found.name:9} {state}{f', {found.version}' if found.version else ''}")
        lines += [f"          {text}" for text in ((found.reason,) if found.reason else ()) + found.details]
        if found.rates is not None:
            rates = found.rates
            lines.append(
                f"          on this host {rates.bytes_per_s / 1e9:.2f} GB/s at 1 MiB, "
                f"{rates.descriptor_s * 1e6:.2f} us a descriptor, {rates.latency_s * 1e6:.0f} us for one small read"
            )
        lines += [f"          warning: {text}" for text in found.warnings]
    lines.append(f"auto      {report.auto.name or 'nothing works'}: {report.auto.reason}")
    return "\n".join(lines)


def report() -> str:
    """Examine this host, with measurements, and return the report in words."""
    return render(examine())


def _examine(row: Availability, host: HostReport, measured: bool, nbytes: int, timeout_s: float) -> BackendReport:
    if not row.ok:
        return BackendReport(row.name, False, row.reason)
    version, details, warnings = _native(row.name, host)
    found = BackendReport(row.name, True, "", version, details, warnings)
    if not measured:
        return found
    start = time.monotonic()
    try:
        return replace(found, rates=measure(row.name, nbytes=nbytes, timeout_s=timeout_s))
    except (TransportError, ReshardError, OSError) as error:
        took = time.monotonic() - start
        return replace(found, ok=False, reason=f"it failed after {took:.1f} s: {type(error).__name__}: {error}")


def _native(name: str, host: HostReport) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """Return (version, details, warnings) of a backend's native library."""
    if name not in ("ucx", "nixl"):
        return "", (), ()
    warnings = list(_host_warnings(host))
    if name == "nixl":
        from reshard.transports.nixl.library import installed

        package = installed()
        version = f"{package} {importlib.metadata.version(package.replace('_', '-'))}"
        library = _bundled_ucx(package)
        warnings += _emulation_warnings()
    else:
        version, library = "", ""
    if importlib.util.find_spec("cffi") is None or (name == "nixl" and not library):
        return version, (), tuple(warnings)
    from reshard.transports.ucx.describe import describe

    try:
        ucx = describe(library)
    except TransportError as error:
        return version, (f"its UCX cannot be asked: {error}",), tuple(warnings)
    details = [
        f"UCX {ucx.version} ({ucx.origin}): {ucx.path}",
        f"memory: {', '.join(ucx.memory_kinds)}; devices: {', '.join(f'{t}/{d}' for t, d in ucx.resources)}",
    ]
    details += [f"environment: {key}={value}" for key, value in sorted(ucx.environment.items())]
    if name == "ucx":
        return f"UCX {ucx.version}", tuple(details), (*ucx.warnings, *warnings)
    for key, wanted in _HURTS.items():
        if ucx.environment.get(key, wanted) != wanted:
            warnings.append(f"{key}={ucx.environment[key]}: UCX emulates NIXL's reads in software; set {key}={wanted}")
    return version, tuple(details), tuple(warnings)


def _bundled_ucx(package: str) -> str:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return ""
    folder = Path(spec.origin).parents[1] / f"{package}.libs"
    return next((str(path) for path in sorted(folder.glob("libucp-*.so*"))), "")


def _host() -> HostReport:
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    scope = _text(_PTRACE_SCOPE)
    nics = []
    for port in sorted(_INFINIBAND.glob("*/ports/*")):
        state = _text(port / "state").partition(": ")[2] or "unknown"
        nics.append(f"{port.parents[1].name} port {port.name}: {state}, {_text(port / 'rate') or 'unknown rate'}")
    return HostReport(
        len(os.sched_getaffinity(0)),
        -1 if soft == resource.RLIM_INFINITY else soft,
        int(scope) if scope.isdigit() else -1,
        tuple(nics),
    )


def _host_warnings(host: HostReport) -> list[str]:
    warnings = []
    if host.nics and host.memlock_bytes >= 0:
        warnings.append(
            f"only {host.memlock_bytes} bytes may be locked, and RDMA locks what it registers: "
            "raise it (ulimit -l unlimited)"
        )
    if host.ptrace_scope > 1:
        warnings.append(
            f"kernel.yama.ptrace_scope={host.ptrace_scope}: CMA needs CAP_SYS_PTRACE here; "
            "without it reads on one host are emulated"
        )
    return warnings


def _emulation_warnings() -> list[str]:
    """Where NIXL's reads would be emulated, and what that means."""
    from reshard.transports.nixl.emulation import LIMIT, active_ports, emulated

    active = active_ports(_INFINIBAND)
    return [
        f"{where} UCX emulates NIXL's reads in software: {LIMIT}"
        for where, visible in (("between hosts", False), ("on one host", True))
        if emulated(visible=visible, environment=os.environ, options={}, active=active)
    ]


def _cma_words(scope: int) -> str:
    if scope <= 0:
        return "CMA allowed between processes of one user"
    if scope == 1:
        return "CMA allowed to processes that a peer admits (ptrace_scope 1; UCX asks for it)"
    return f"CMA needs CAP_SYS_PTRACE (ptrace_scope {scope})"


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
