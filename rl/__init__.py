"""meshdial: reinforcement-learning post-training of language models as a pipeline of files.

Array names carry their shape as a suffix, one letter an axis:

    B batch row    T position      S cache slot    D model width   H query head   K key-value head
    C head size    F feed-forward  V vocabulary    P prompt        G group member L layer

Where they are wanted, M is any number of things in a list, N packed tokens or pages of a cache,
R query heads of a key-value head or chunks of prompts, U rows that share pages; in packed batches
B counts bins.

`tokens_PGT` has a row for each group member of each prompt, and a column for each position.
Merged axes stand side by side behind an underscore: `tokens_PG_T`.
"""

__version__ = "0.1.0"
