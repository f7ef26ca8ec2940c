"""Statistics of paired evaluations: pure functions on counts and arrays. Reasons and tables:
docs/statistics.md."""

from evals.statistics.anytime import (
    AnytimeMonitor,
    noninferiority_log_e,
    regression_log_e,
)
from evals.statistics.counts import StatusComparison, compare_status, holm, status_from_counts, wilson
from evals.statistics.flips import FlipTest, flips_against_floor, flips_against_stored_floor
from evals.statistics.groupsequential import (
    Looks,
    crossing_probabilities,
    curtail,
    obrien_fleming,
    plan_looks,
    shown_noninferior,
    shown_regression,
)
from evals.statistics.paired import (
    NonInferiority,
    PairedCounts,
    critical,
    equivalence,
    mcnemar_exact,
    mcnemar_exact_two_sided,
    mcnemar_midp,
    mcnemar_midp_two_sided,
    newcombe_interval,
    noninferiority,
    tango_interval,
    tango_lower,
    tango_upper,
    tango_z,
)
from evals.statistics.power import (
    attainable_margin,
    detectable_drop,
    noninferiority_power,
    regression_power,
    required_items,
    required_repeats,
    standard_error,
)
from evals.statistics.ratios import Ratio, length_ratio, length_ratio_bca, recovery, restricted_ratio_cells
from evals.statistics.repeats import Clustered, clustered

__all__ = [name for name in dir() if not name.startswith("_") and name not in ("annotations",)]
