"""The columns of every table that crosses a stage's boundary, and the one way to name a sample."""

import hashlib

import pyarrow as pa

from rl.artifacts.content import canonical_json

# The tables of rewards have one column more for each component, its value before any normalising.
COMPONENT_PREFIX = "component:"
OPEN_KINDS = {
    "rewards": (COMPONENT_PREFIX, pa.float64()),
    "model_scores": (COMPONENT_PREFIX, pa.float64()),
}


def _schema(*columns: tuple[str, pa.DataType], nullable: tuple[str, ...] = ()) -> pa.Schema:
    return pa.schema([pa.field(name, kind, name in nullable) for name, kind in columns])


_ROLLOUT_COLUMNS = (
    ("sample_id", pa.string()),
    ("group_id", pa.string()),
    ("prompt_id", pa.string()),
    ("prompt", pa.string()),
    ("prompt_tokens", pa.list_(pa.int32())),
    ("completion", pa.string()),
    ("completion_tokens", pa.list_(pa.int32())),
    ("completion_mask", pa.list_(pa.bool_())),
    ("rollout_logprobs", pa.list_(pa.float32())),
    ("sampling_logprobs", pa.list_(pa.float32())),  # null unless the sampling truncates
    ("policy_version", pa.int32()),
    ("finish_reason", pa.string()),
    ("ground_truth", pa.string()),
    ("info", pa.string()),  # JSON
)

SCHEMAS: dict[str, pa.Schema] = {
    "prompts": _schema(
        ("prompt_id", pa.string()),
        ("prompt", pa.string()),  # plain text, or
        ("messages", pa.string()),  # a JSON list of {role, content}
        ("ground_truth", pa.string()),
        ("info", pa.string()),  # JSON
        nullable=("prompt", "messages"),
    ),
    "rollouts": _schema(*_ROLLOUT_COLUMNS, nullable=("sampling_logprobs",)),
    "model_scores": _schema(
        ("sample_id", pa.string()),
        ("failure", pa.string()),  # JSON: {model: why it has no score}
        nullable=("failure",),
    ),
    "rewards": _schema(
        ("sample_id", pa.string()),
        ("reward", pa.float64()),  # null where scoring failed: 0.0 is a reward
        ("scored_ok", pa.bool_()),
        ("failure", pa.string()),
        nullable=("reward", "failure"),
    ),
    "reference": _schema(
        ("sample_id", pa.string()), ("reference_logprobs", pa.list_(pa.float32()))
    ),
    "policy_logprobs": _schema(
        ("sample_id", pa.string()), ("policy_logprobs", pa.list_(pa.float32()))
    ),
    "values": _schema(  # of the state before each token of the completion
        ("sample_id", pa.string()),
        ("values", pa.list_(pa.float32())),
    ),
    "advantages": _schema(
        ("sample_id", pa.string()),
        ("group_id", pa.string()),
        ("reward", pa.float64()),  # null where it does not count
        ("shaped_reward", pa.float64()),  # after penalties on length
        ("advantages", pa.list_(pa.float32())),  # of each token of the completion
        ("returns", pa.list_(pa.float32())),  # what a critic should have said; null without one
        ("is_degenerate", pa.bool_()),  # the sample's group has no spread
        ("is_used", pa.bool_()),  # the update takes the sample's group
        nullable=("reward", "shaped_reward", "returns"),
    ),
    "evaluation": _schema(
        *_ROLLOUT_COLUMNS,
        ("reward", pa.float64()),
        ("is_correct", pa.bool_()),
        ("is_sampled", pa.bool_()),  # one of those for pass@k; accuracy is of the others
        ("scored_ok", pa.bool_()),
        nullable=("sampling_logprobs", "reward"),
    ),
    "metrics": _schema(
        ("run", pa.string()),
        ("iteration", pa.int32()),
        ("stage", pa.string()),
        ("name", pa.string()),
        ("value", pa.float64()),
    ),
}


def group_id(run_seed: int, iteration: int, prompt_id: str) -> str:
    """The stable name of a prompt's samples in one iteration: 96 bits of a hash, in hex."""
    key = canonical_json([int(run_seed), int(iteration), prompt_id])
    return hashlib.sha256(key.encode()).hexdigest()[:24]


def sample_id(group: str, sample_index: int) -> str:
    """The stable name of one sample of a group."""
    return f"{group}-{sample_index}"
