"""Plans: the contents of one, as text for people and for files."""

from dataclasses import dataclass

from forkpoint.errors import PlanError
from forkpoint.plan.contents import Candidate as Candidate
from forkpoint.plan.contents import PlanContents
from forkpoint.plan.contents import fingerprint as fingerprint
from forkpoint.plan.explain import explain
from forkpoint.plan.written import read_plan
from forkpoint.rollouts.schema import SchemaError, parse_json


@dataclass(frozen=True, eq=False)
class Plan(PlanContents):
    """The complete program of a step on one batch.

    Made by `forkpoint.plan.make_plan`; needs no torch.
    """

    def explain(self, *, width: int = 100) -> str:
        """A description as text: what runs, what is saved, why it was chosen, what was refused."""
        return explain(self, width=width)

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """Read a plan that `to_json` wrote.

        Raises:
            PlanError: it is not a plan, one of another version, or one whose parts disagree.
        """
        try:
            values = parse_json(text)
        except SchemaError as error:
            raise PlanError(
                f"this is {error}, so it is no plan. Give what Plan.to_json returned."
            ) from error
        return read_plan(values, cls)
