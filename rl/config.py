"""From a config file to complete, checked runs.

The schema in `workflow/schemas/config.schema.yaml` is the only place of defaults. `complete` fills
them in and refuses what does not fit, each time with one sentence; `expand` turns a sweep into one
config a run.
"""

import difflib
import functools
import itertools
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from rl.algorithms.presets import PRESETS
from rl.conflicts import conflicts, unread_keys
from rl.errors import MeshdialError

SCHEMA = Path(__file__).parents[1] / "workflow" / "schemas" / "config.schema.yaml"
SWEEP_KEYS = ("base", "grid", "runs")
MISSING = object()
# A whole number is written as one, and NaN and infinity are no settings.
Validator = jsonschema.validators.extend(
    jsonschema.Draft202012Validator,
    type_checker=jsonschema.Draft202012Validator.TYPE_CHECKER.redefine_many(
        {
            "integer": lambda _, value: isinstance(value, int) and not isinstance(value, bool),
            "number": lambda _, value: (
                isinstance(value, int | float)
                and not isinstance(value, bool)
                and math.isfinite(value)
            ),
        }
    ),
)
PLAIN_TYPES = {"integer": int, "number": (int, float), "boolean": bool, "null": type(None)}


@functools.cache
def schema() -> dict:
    """The schema of one run's config."""
    return yaml.safe_load(SCHEMA.read_text())


def complete(config: Mapping, name: str = "the config") -> dict:
    """A copy of `config` with every default filled in, checked key by key and key against key.

    What is not written comes from the algorithm's preset, and then from the schema.
    """
    config = _parsed(config, schema())
    for error in sorted(Validator(schema()).iter_errors(config), key=str):
        raise MeshdialError(f"{name}: {_sentence(error)}")
    filled = _fill(_with_preset(config), schema())
    _follow(filled)
    plain = _fill(_with_preset({}, _preset(config)), schema()) | {"learner": filled["learner"]}
    _follow(plain)
    for sentence in (*unread_keys(config, filled, plain), *conflicts(filled)):
        raise MeshdialError(f"{name}: {sentence}")
    return filled


def _preset(config: Mapping) -> str:
    block = schema()["properties"]["algorithm"]["properties"]["preset"]
    return config.get("algorithm", {}).get("preset", block["default"])


def _with_preset(config: Mapping, preset: str | None = None) -> dict:
    """`config` on top of the settings of a preset, its own by default."""
    settings = PRESETS[preset or _preset(config)].settings
    only_models = {"reward.functions": []} if config.get("reward", {}).get("models") else {}
    return _with_settings(_with_settings({}, settings | only_models), config)


def _follow(filled: dict) -> None:
    """Keys whose null stands for another key's value."""
    if filled["evaluation"]["functions"] is None:
        # What is right does not depend on what else was sampled.
        functions = [entry | {"normalise": "none"} for entry in filled["reward"]["functions"]]
        filled["evaluation"]["functions"] = functions
    for key in ("epochs", "updates_per_batch"):
        if filled["critic"][key] is None:
            filled["critic"][key] = filled["learner"][key]


def expand(config: Mapping, folder: Path = Path(".")) -> dict[str, dict]:
    """The complete configs of all runs that `config` asks for, by run name.

    A config with a `sweep` block (`base`: a config file; `grid`: key to list of values; `runs`:
    list of key to value; keys are dotted) is one run for each combination, named after the values.
    Keys beside the block hold for all of its runs. `folder` is what `base` is relative to.
    """
    if "sweep" not in config:
        filled = complete(config)
        return {filled["run"]: filled}
    sweep = _checked_sweep(config["sweep"])
    base = read(folder / sweep["base"]) if "base" in sweep else {}
    common = _with_settings(base, {key: value for key, value in config.items() if key != "sweep"})
    runs: dict[str, dict] = {}
    for settings, label in _choices(sweep):
        run = f"{common.get('run', 'sweep')}_{label}"
        if run in runs:
            raise MeshdialError(f"sweep: two runs are called {run!r}; name them apart")
        runs[run] = complete(_with_settings(common, settings) | {"run": run}, f"run {run}")
    return runs


def read(path: Path) -> dict:
    """The mapping in a YAML file."""
    try:
        value = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        raise MeshdialError(f"{path}: no such config file") from None
    except yaml.YAMLError as error:
        raise MeshdialError(f"{path}: not a YAML file ({' '.join(str(error).split())})") from None
    if not isinstance(value, dict):
        raise MeshdialError(f"{path}: expected a mapping of config keys, found {value!r:.40}")
    return value


def leaves(config: Mapping, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of everything in a config that is not a block with keys of its own."""
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def sweep_name(config: Mapping) -> str | None:
    """The name of the sweep, or None for a single run."""
    return config.get("run", "sweep") if "sweep" in config else None


def _checked_sweep(sweep: Any) -> Mapping:
    keys = set(sweep) if isinstance(sweep, Mapping) else set()
    if not keys & {"grid", "runs"} or keys - set(SWEEP_KEYS):
        raise MeshdialError(f"sweep: expected the keys base and grid or runs, found {_keys(sweep)}")
    return sweep


def _choices(sweep: Mapping) -> Iterator[tuple[dict, str]]:
    """(settings, label) of each run: every entry of `runs` at every point of the grid."""
    grid = sweep.get("grid", {})
    if not isinstance(grid, Mapping):
        raise MeshdialError(f"sweep: grid is {grid!r}, expected a mapping from key to values")
    for key, values in grid.items():
        if not isinstance(values, list) or not values:
            raise MeshdialError(f"sweep: grid.{key} is {values!r}, expected a list of values")
    runs = sweep.get("runs", [{}])
    if not isinstance(runs, list) or not all(isinstance(run, Mapping) for run in runs):
        raise MeshdialError("sweep: runs is expected to be a list of mappings from key to value")
    for run in runs:
        for values in itertools.product(*grid.values()):
            yield _choice(run, dict(zip(grid, values, strict=True)))


def _choice(run: Mapping, point: Mapping) -> tuple[dict, str]:
    settings = {key: value for key, value in run.items() if key != "name"}
    named = ["name"] if "name" in run else list(settings)
    words = [str(run[key]) if key == "name" else _label(key, run[key]) for key in named]
    return settings | point, "_".join(words + [_label(key, value) for key, value in point.items()])


def _label(dotted: str, value: Any) -> str:
    """`algorithm.kl.coefficient`, 0.01 -> `coefficient-0.01`."""
    text = format(value, "g") if isinstance(value, float) else str(value)
    word = re.sub(r"[^a-z0-9.-]+", "-", text.lower()).strip("-") or "none"
    return f"{dotted.rpartition('.')[2].replace('_', '-')}-{word}"


def _with_settings(base: Mapping, settings: Mapping) -> dict:
    """`base` with each dotted key of `settings` set; mappings are merged, the rest replaced."""
    merged = {key: value for key, value in base.items()}
    for dotted, value in settings.items():
        key, _, rest = dotted.partition(".")
        inner = merged.get(key)
        if rest:
            merged[key] = _with_settings(inner if isinstance(inner, Mapping) else {}, {rest: value})
        elif isinstance(value, Mapping) and isinstance(inner, Mapping):
            merged[key] = _with_settings(inner, value)
        else:
            merged[key] = value
    return merged


def _parsed(value: Any, rules: Mapping) -> Any:
    """`value` with text in place of a number or a flag read as such: on a command line
    (`--config 'optimizer={"learning_rate": 1e-4}'`) everything nested arrives as text."""
    rules = _chosen(value, rules)
    if isinstance(value, Mapping):
        known, others = rules.get("properties", {}), rules.get("additionalProperties")
        others = others if isinstance(others, Mapping) else {}
        return {key: _parsed(inner, known.get(key, others)) for key, inner in value.items()}
    if isinstance(value, list):
        return [_parsed(item, rules.get("items", {})) for item in value]
    kinds = rules.get("type", [])
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if isinstance(value, str) and "string" not in kinds:
        read = _number_or_flag(value)
        if any(isinstance(read, PLAIN_TYPES[kind]) for kind in kinds if kind in PLAIN_TYPES):
            return read
    return value


def _number_or_flag(text: str) -> Any:
    try:
        return float(text) if re.fullmatch(r"[-+.\d]+e[-+]?\d+", text) else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError):
        return text


def _fill(value: Any, rules: Mapping) -> Any:
    """`value` with the defaults of `rules` at every depth."""
    rules = _chosen(value, rules)
    if isinstance(value, Mapping):
        filled = dict(value)
        for key, rule in rules.get("properties", {}).items():
            given = filled.get(key, rule.get("default", MISSING))
            if given is not MISSING:
                filled[key] = _fill(given, rule)
        extra = rules.get("additionalProperties")
        if isinstance(extra, Mapping):
            filled = {key: _fill(inner, extra) for key, inner in filled.items()}
        return filled
    if isinstance(value, list) and "items" in rules:
        return [_fill(item, rules["items"]) for item in value]
    return value


def _chosen(value: Any, rules: Mapping) -> Mapping:
    """The branch of a `oneOf` or `$ref` that applies to `value`."""
    if "$ref" in rules:
        return schema()["$defs"][rules["$ref"].rpartition("/")[2]]
    if "oneOf" in rules and isinstance(value, Mapping | list):
        return next((_chosen(value, rule) for rule in rules["oneOf"] if "$ref" in rule), rules)
    return rules


def _sentence(error: jsonschema.ValidationError) -> str:
    """What is wrong, in one sentence that names the key, what was found and what was expected."""
    error = _meant(error)
    if "propertyNames" in error.absolute_schema_path:
        key = ".".join(map(str, [*error.absolute_path, error.instance]))
        return f"unknown key {key}; expected {_one_of(error.validator_value)}"
    key = ".".join(str(part) for part in error.absolute_path)
    found = f"{error.instance!r:.60}"
    where = f"{key} is {found}" if key else "the top level"
    match error.validator:
        case "additionalProperties":
            return _unknown_key(error, key)
        case "oneOf":
            return f"{where}, expected {_one_of(_alternatives(error.validator_value))}"
        case "required":
            return f"the key {_dotted(key, _missing_key(error))} is missing"
        case "type":
            kinds = error.validator_value
            return f"{where}, expected {_one_of(kinds if isinstance(kinds, list) else [kinds])}"
        case "enum":
            return f"{where}, expected {_one_of(error.validator_value)}"
        case "const":
            return f"{where}, expected {error.validator_value!r}"
        case "minimum" | "exclusiveMinimum":
            bound = "at least" if error.validator == "minimum" else "more than"
            return f"{where}, expected {bound} {error.validator_value}"
        case "maximum" | "exclusiveMaximum":
            bound = "at most" if error.validator == "maximum" else "less than"
            return f"{where}, expected {bound} {error.validator_value}"
        case "multipleOf":
            return f"{where}, expected a multiple of {error.validator_value}"
        case "minProperties":
            return f"{where}, expected at least {error.validator_value} entry"
        case "minItems" | "maxItems":
            bound = "at least" if error.validator == "minItems" else "at most"
            return f"{where}, expected {bound} {error.validator_value} entries"
        case "pattern":
            letters = "letters" if "A-Z" in error.validator_value else "lower-case letters"
            return f"{where}, expected {letters}, digits, '.', '_' and '-'"
        case "not":
            return f"{where}, which is a reserved name"
        case _:
            return f"{where}: {error.message}"


def _meant(error: jsonschema.ValidationError) -> jsonschema.ValidationError:
    """Of a choice that failed, the error in the branch of the value's own type."""
    if error.validator != "oneOf":
        return error
    right_type = [inner for inner in error.context if inner.validator not in ("type", "enum")]
    return _meant(right_type[0]) if right_type else error


def _alternatives(branches: list[Mapping]) -> list:
    words: list = []
    for branch in branches:
        words += branch.get("enum", [branch.get("type", "object")])
    return words


def _unknown_key(error: jsonschema.ValidationError, parent: str) -> str:
    known = sorted(error.schema.get("properties", {}))
    unknown = next(key for key in error.instance if key not in known)
    close = difflib.get_close_matches(str(unknown), known, n=1)
    hint = f"did you mean {close[0]}?" if close else f"expected {_one_of(known)}"
    return f"unknown key {_dotted(parent, unknown)}; {hint}"


def _missing_key(error: jsonschema.ValidationError) -> str:
    return next(key for key in error.validator_value if key not in error.instance)


def _dotted(parent: str, key: str) -> str:
    return f"{parent}.{key}" if parent else str(key)


def _one_of(values: list) -> str:
    words = [str(value) for value in values]
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + f" or {words[-1]}"


def _keys(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, Mapping) else repr(value)
