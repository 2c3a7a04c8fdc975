"""A database migration against a live PostgreSQL, in a virtual machine.

The workspace holds the old schema and the rules of the new one; the answer is
`migration.sql`. `check.py` makes the old schema afresh, fills it, applies
the migration and looks at what is there, through `psql`. Hidden rows differ from
the visible ones in number and in what makes a migration hard: names in odd
spelling, amounts without cents, orders of customers that do not exist, and an
index and constraints that only show when something violates them.

Machines need `machine.driver=microvm` and `machine.image=postgres`: the server is
part of the image, and every fork of it has a server of its own, running.
"""

from __future__ import annotations

import json

from composer.config import TasksConfig
from composer.environments.tasks.repair import TaskSet
from composer.records import Task

INSTRUCTION = """The PostgreSQL server of this machine holds customers and orders \
as schema.sql makes them. Write migration.sql, which turns that schema, with \
whatever rows it holds, into this one:
- customers(id integer primary key, name text not null, email text not null): \
email in lower case and without spaces around it; unique.
- orders(id integer primary key, customer_id integer not null referencing \
customers, cents bigint not null, placed_on date not null): cents from amount \
(text such as 'EUR 12.30' or 'EUR 7'), placed_on from placed (text, DD.MM.YYYY).
- orders whose customer does not exist move, as they were, to a table \
orphaned_orders(id, customer, amount, placed), and of customers with the same \
email only the one with the lowest id stays, with all their orders.
- an index on orders(customer_id).
`python check.py` applies migration.sql to fresh tables and checks them. psql \
works without a password.
"""
SCHEMA = """create table customers (id integer primary key, name text, email text);
create table orders (
  id integer primary key, customer integer, amount text, placed text
);
"""
# (id, name, email), (id, customer, amount, placed)
VISIBLE = (
  ((1, 'Ada', 'ada@example.org'), (2, 'Max', 'Max@Example.org ')),
  (
    (10, 1, 'EUR 12.30', '03.02.2024'),
    (11, 2, 'EUR 7', '29.02.2024'),
    (12, 9, 'EUR 1.00', '01.01.2024'),
  ),
)
HIDDEN = (
  (
    (1, "O'Hara", ' OHARA@example.org'),
    (2, 'Ada', 'ada@example.org'),
    (5, 'Ada L.', 'ADA@example.org'),
    (7, 'Zoë', 'zoe@example.org'),
  ),
  (
    (1, 5, 'EUR 0.05', '31.12.1999'),
    (2, 2, 'EUR 1234567.89', '01.03.2024'),
    (3, 7, 'EUR 40', '11.10.2012'),
    (4, 8, 'EUR 3.50', '05.05.2005'),
    (5, 1, 'EUR 0', '28.02.2023'),
  ),
)
CHECK = r'''"""Applies migration.sql to a fresh database and checks what is there."""

import json
import os
import secrets
import subprocess
import sys

STRICT = ('-v', 'ON_ERROR_STOP=1')


def psql(text, *options):
  """(whether it worked, its output, its errors); one start for many commands."""
  done = subprocess.run(
    ['psql', '-XqAt', *options, '-d', 'root'],
    input=text, capture_output=True, text=True, timeout=60)
  return done.returncode == 0, done.stdout, done.stderr.strip()


def quoted(value):
  return str(value) if isinstance(value, int) else "'" + value.replace("'", "''") + "'"


def fill(table, rows):
  return ''.join(
    f'insert into {table} values ({", ".join(map(quoted, row))});' for row in rows)


def answers(queries):
  """(whether it failed, its output) of each query."""
  mark = secrets.token_hex(8)
  text = ''.join(f'{query};\n\\echo {mark} :ERROR\n' for query in queries)
  found, lines = [], []
  for line in psql(text)[1].splitlines():
    if line.startswith(mark):
      found.append((line.endswith('true'), '\n'.join(lines)))
      lines = []
    else:
      lines.append(line)
  return found + [(True, '')] * (len(queries) - len(found))


def main():
  with open('rows.json') as file:
    rows = json.load(file)
  os.chmod('rows.json', 0o600)  # the server, which migration.sql commands, is
  with open('schema.sql') as file:  # another user, and must not read the checks
    schema = file.read()
  fresh = 'drop schema public cascade; create schema public;'
  filled = fill('customers', rows['customers']) + fill('orders', rows['orders'])
  ok, _, said = psql(fresh + schema + filled, *STRICT)
  assert ok, said
  try:
    with open('migration.sql') as file:
      ok, _, said = psql('', *STRICT, '-c', file.read())  # without psql's own \!
  except (OSError, ValueError) as error:
    ok, said = False, str(error)
  if not ok:
    print('migration.sql failed:', said)
  passed = 0
  for (name, _, wanted), (failed, got) in zip(
    rows['checks'], answers([query for _, query, _ in rows['checks']])):
    good = ok and (failed if wanted is None else not failed and got == wanted)
    passed += good
    if not good:
      print(f'{name}: expected {wanted!r}, got {"an error" if failed else got!r}')
  print(f'passed {passed} of {len(rows["checks"])}')
  return 0 if passed == len(rows['checks']) else 1


sys.exit(main())
'''
SOLUTION = """begin;
update customers set email = lower(btrim(email));
alter table orders rename to old_orders;
create table orphaned_orders as
  select * from old_orders o
  where not exists (select from customers c where c.id = o.customer);
create temp table kept as
  select c.id, min(c.id) over (partition by c.email) as first from customers c;
create table orders (
  id integer primary key,
  customer_id integer not null references customers,
  cents bigint not null,
  placed_on date not null
);
insert into orders
  select o.id, k.first, round(substr(o.amount, 5)::numeric * 100)::bigint,
    to_date(o.placed, 'DD.MM.YYYY')
  from old_orders o join kept k on k.id = o.customer;
drop table old_orders;
delete from customers c using kept k where k.id = c.id and k.first <> c.id;
alter table customers alter name set not null, alter email set not null;
create unique index on customers(email);
create index on orders(customer_id);
commit;
"""
TOOLS = ('read', 'write', 'run', 'test', 'submit')


def build() -> Task:
  """The task, for a pool of virtual machines with the image `postgres`."""
  return Task(
    id='migration/orders',
    kind='migration',
    instruction=INSTRUCTION,
    files={
      'schema.sql': SCHEMA,
      'check.py': CHECK,
      'rows.json': rows_of(*VISIBLE),
    },
    tools=TOOLS,
    test_command=('python', 'check.py'),
    allowed=('migration.sql',),
    hidden_files={
      'schema.sql': SCHEMA,
      'check.py': CHECK,
      'rows.json': rows_of(*HIDDEN),
    },
    hidden_command=('python', 'check.py'),
    # An emulated machine takes its time, which is no fault of a session's.
    metadata={
      'image': 'postgres',
      'driver': 'microvm',
      'seconds': 60.0,
      'solution': {'migration.sql': SOLUTION},
    },
  )


def build_tasks(config: TasksConfig) -> TaskSet:
  """The one task, to train on; `config` has nothing to say of it."""
  del config
  return TaskSet((build(),), (), ())


def rows_of(customers, orders) -> str:
  """`rows.json`: what the database holds before, and the checks after.

  A check is (name, query, its output, or None where it has to fail). What is
  expected is worked out here, not by a database.
  """
  kept: dict[str, int] = {}
  for number, _, email in sorted(customers):
    kept.setdefault(email.strip().lower(), number)
  owner = {n: kept[email.strip().lower()] for n, _, email in customers}
  people = [
    f'{n}|{name}|{email.strip().lower()}'
    for n, name, email in sorted(customers)
    if owner[n] == n
  ]
  good = [
    f'{n}|{owner[customer]}|{_cents(amount)}|{_iso(placed)}'
    for n, customer, amount, placed in sorted(orders)
    if customer in owner
  ]
  orphans = [
    f'{n}|{customer}|{amount}|{placed}'
    for n, customer, amount, placed in sorted(orders)
    if customer not in owner
  ]
  first = next(iter(kept))
  checks = [
    ('customers', 'table customers order by id', '\n'.join(people)),
    ('orders', 'table orders order by id', '\n'.join(good)),
    ('orphans', 'table orphaned_orders order by id', '\n'.join(orphans)),
    (
      'types',
      'select data_type from information_schema.columns where table_name ='
      " 'orders' order by ordinal_position",
      'integer\ninteger\nbigint\ndate',
    ),
    (
      'index',
      "select count(*) > 0 from pg_indexes where tablename = 'orders' and"
      " indexdef like '%(customer_id)%'",
      't',
    ),
    (
      'reference',
      "insert into orders values (900, 9999, 1, '2024-01-01')",
      None,
    ),
    ('not null', 'insert into orders values (901, 1, null, null)', None),
    ('unique', f"insert into customers values (900, 'x', '{first}')", None),
  ]
  return json.dumps(
    {'customers': customers, 'orders': orders, 'checks': checks}
  )


def _cents(amount: str) -> int:
  whole, _, part = amount.removeprefix('EUR ').partition('.')
  return int(whole) * 100 + int(part.ljust(2, '0') or 0)


def _iso(placed: str) -> str:
  day, month, year = placed.split('.')
  return f'{year}-{month}-{day}'
