"""Machines: the worlds in which tools and tests run for real.

    pool = Pool(config.machine)
    machine = await pool.acquire({'a.py': 'print(1)'})
    result = await machine.run(['python', 'a.py'])
    await pool.release(machine)

A machine is forked from a zygote, a small warmed interpreter (`inside/`), and a
command that begins with `python` from the machine's own process 1: no
interpreter starts anywhere. Drivers: `namespace` isolates, `process` does not.
"""

from composer.environments.machines.machine import ExecResult as ExecResult
from composer.environments.machines.machine import Machine as Machine
from composer.environments.machines.machine import MachineError as MachineError
from composer.environments.machines.machine import (
  MissingFacility as MissingFacility,
)
from composer.environments.machines.pool import Pool as Pool
from composer.environments.machines.pool import probe as probe
from composer.environments.machines.pool import start as start
