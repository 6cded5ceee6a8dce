"""What the engine would do with many requests on a machine that you do not have: its own step, with a decoder
that computes nothing and a clock that moves by what the step would have cost.

    from jpaged.simulate import Traffic, simulate

    traffic = Traffic.random(100_000, seed=0, per_s=20)
    simulate(traffic, config, costs=CostModel.of(model, "bfloat16", MACHINES["h200"]), loads=(0.5, 1, 2))

All of it is traced. Runs with other policies, or with requests that come faster, go side by side under `vmap`; see
`traced`. What is scheduled is what `Engine` schedules with bursts of one step and one token budget, to the last page,
if requests reach it at these times and steps take this long. That they do is the assumption. An engine with several
budgets may grant a few tokens a step later, where `demand` had not foreseen what a preemption leaves to the others.

    traffic   requests as arrays       traced   the simulated engine        host     checks, calls, progress
    clock     exact time                        and its clock               result   what became of the requests
"""

from jpaged.simulate.host import simulate
from jpaged.simulate.result import SimulatedRun, Simulation
from jpaged.simulate.traffic import Traffic

__all__ = ["SimulatedRun", "Simulation", "Traffic", "simulate"]
