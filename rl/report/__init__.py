"""From a run's artifacts to figures and words.

1. `metrics.collect_metrics` reads each iteration's tables and gives one tidy table of numbers.
2. `figures.FIGURES` draws that table, one SVG a figure; `comparison` draws several runs of a sweep.
3. `summary.summary_lines` says in a few lines what the run did.
4. `sinks` sends the same numbers to TensorBoard or Weights & Biases, for those who want them there.

Whatever depends on the clock or the machine (`metrics.collect_timings`) is kept apart, so that
the metrics of a run that is made again are the same file.
"""
