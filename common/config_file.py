"""--config: a YAML file of flags, as OUTPUT_DIR/run.yaml is one."""
import argparse

import yaml  # comes with transformers

from common.text import UserError, need
from core.json_files import read_text


def words_of(parser, words, known, nearest, boolean):
    """The words of a command line for the YAML file that --config names there, if it does.

    Values are taken as they are written, so on, 5e-5 and 007 stay what they are; an empty one or
    null gives no flag. known, nearest, boolean: flags.spellings of the parser, and its functions.
    Raises UserError.
    """
    files = [words[i + 1] for i, word in enumerate(words[:-1]) if word == "--config"]
    files += [word.removeprefix("--config=") for word in words if word.startswith("--config=")]
    if not files:       # argparse says that its value is missing
        return []
    need(len(files) == 1, "--config is given twice")
    file, found, made = files[0], set(), []
    try:
        tree = yaml.compose(read_text(file, "--config "), Loader=yaml.BaseLoader)
    except (yaml.YAMLError, RecursionError) as error:
        raise UserError(f"--config {file}: is not YAML ({' '.join(str(error).split())})")
    need(tree is None or isinstance(tree, yaml.MappingNode),
         f"--config {file}: must be lines of flag: value")
    for key, value in tree.value if tree else ():
        where, name = f"--config {file} line {key.start_mark.line + 1}", str(key.value)
        action = parser._option_string_actions.get(f"--{name}")
        if action is None or action.dest in ("config", "help"):
            names = {flag.removeprefix("--") for flag in known}
            near = nearest(name, names - {"config", "help", "-h"})
            raise UserError(f"{where}: {name}: no such flag; the nearest one is {near}")
        need(action.dest not in found, f"{where}: {name} is there twice")
        found.add(action.dest)
        items = value.value if isinstance(value, yaml.SequenceNode) else [value]
        need(all(isinstance(item, yaml.ScalarNode) for item in items),
             f"{where}: {name} takes a value or a list")
        if isinstance(value, yaml.SequenceNode):
            need(action.nargs not in (None, 0, "?"), f"{where}: {name} takes one value, not a list")
            made += [f"--{name}", *(item.value for item in items)]
        elif value.style is None and value.value in ("", "~", "null"):
            continue
        elif isinstance(action, argparse.BooleanOptionalAction):
            made.append(f"--{name}" if boolean(value.value) else f"--no-{name}")
        else:       # one word: the value may begin with a dash
            made.append(f"--{name}={value.value}")
    return made
