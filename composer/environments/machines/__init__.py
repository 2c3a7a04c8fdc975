"""Machines: the worlds in which tools and tests run for real.

    pool = Pool(config.machine)
    machine = await pool.acquire({'a.py': 'print(1)'})
    result = await machine.run(['python', 'a.py'])
    await pool.release(machine)

A machine of the drivers `namespace` (isolated by the kernel) and `process` (not
isolated at all) is forked from a zygote, a small warmed interpreter (`inside/`),
and a command that begins with `python` from the machine's own process 1: no
interpreter starts anywhere. One of the driver `microvm` is a virtual machine,
forked from the saved state of one that has booted. All are spoken to alike:

    snapshot = await machine.snapshot()
    fork = await pool.acquire({}, snapshot)  # or pool.fork(machine)

`machine.provenance` says what was really in force.
"""

from composer.environments.machines.machine import ExecResult as ExecResult
from composer.environments.machines.machine import Machine as Machine
from composer.environments.machines.machine import MachineError as MachineError
from composer.environments.machines.machine import (
  MissingFacility as MissingFacility,
)
from composer.environments.machines.machine import Snapshot as Snapshot
from composer.environments.machines.pool import Pool as Pool
from composer.environments.machines.pool import probe as probe
from composer.environments.machines.pool import start as start
