"""What a config will cost before it runs: bytes on every device, bytes of a sync, seconds.

1. `source` finds the model's sizes, `work` what one iteration does; neither needs a weight.
2. `dial` says which mesh each role runs on, today and in the alternatives.
3. `memory` counts bytes per device, by the very table that shards the parameters.
4. `speed` bounds each stage by arithmetic, memory and links; `iteration` composes the stages.
5. `measured` reads what a run cost, to stand beside what was predicted; `table` prints it all.

Everything is a lower bound of time and an upper bound of what JAX keeps: no kernel reaches its
device's peak, and XLA frees what it can. GB are 10^9 bytes.
"""
