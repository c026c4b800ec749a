"""Model folders."""
import json


def config_of(folder):
    return json.loads((folder / "config.json").read_text())
