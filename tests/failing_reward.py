"""A reward function that fails for some completions."""


def sometimes(completion, sample_id):
    if sample_id.endswith("-1"):
        raise ValueError("not this one")
    return 1.0 + len(completion) % 2 + 0.5 * sample_id.endswith("-0")
