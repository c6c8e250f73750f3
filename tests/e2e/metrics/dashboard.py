"""Reads a dashboard by the classes that Grafana generates from its schema, and writes it again: what the schema lacks
is then missing, and what has another type fails.

usage: dashboard.py FILE, with the package grafana_foundation_sdk in PYTHONPATH
"""

import json
import sys

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard


def compare(path, ours, theirs):
    if isinstance(ours, dict):
        for key, value in ours.items():
            assert key in theirs, f"{path}.{key} is not in the schema"
            compare(f"{path}.{key}", value, theirs[key])
    elif isinstance(ours, list):
        assert len(ours) == len(theirs), path
        for at, (one, other) in enumerate(zip(ours, theirs)):
            compare(f"{path}[{at}]", one, other)
    else:
        assert ours == theirs, f"{path}: {ours!r}, not {theirs!r}"


register_default_plugins()
with open(sys.argv[1]) as file:
    dashboard = json.load(file)
compare("", dashboard, json.loads(JSONEncoder().encode(Dashboard.from_json(dashboard))))
