"""Plans: which microbatches run, in which order, and what they keep. Imports no torch."""

from forkpoint.plan.models import MODELS as MODELS
from forkpoint.plan.models import known_name as known_name
from forkpoint.plan.plan import Plan as Plan
from forkpoint.plan.planner import make_plan as make_plan
from forkpoint.plan.pricing.cost import ModelShape as ModelShape
from forkpoint.plan.pricing.cost import Work as Work
from forkpoint.plan.pricing.totals import Totals as Totals
