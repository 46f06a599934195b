"""How a stage gets a process with its mesh's devices: launchers, workers, and where they meet.

1. `reach` finds the worker of a mesh, or starts it, here or (`pool`) by SLURM's `srun`.
2. `wire` carries requests over a Unix socket, or over TCP after `authentication`.
3. The worker takes its `devices`, which `accelerators` shows to JAX, and keeps them for its
   `lifetime`; `liveness` tells whether those it works for still live.
4. `launch` runs the stage, in the worker or, cold, in the client's own process.
"""
