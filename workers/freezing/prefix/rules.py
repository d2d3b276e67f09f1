"""The rule of the prefix that a job's settings name."""

from __future__ import annotations

from planner.freezing import prefix_rule
from workers.config import FreezeConfig
from workers.freezing.prefix.authors import AuthorsRule
from workers.freezing.prefix.autofreeze import StablePrefix
from workers.freezing.prefix.by_hand import ByHand
from workers.freezing.prefix.paper import PaperRule
from workers.freezing.prefix.rule import PrefixRule
from workers.freezing.prefix.thaw import Thawing
from workers.protocol.frozen_prefix import FrozenPrefix

BOUNDED = {"paper": PaperRule, "authors": AuthorsRule}


def rule_of(config: FreezeConfig, layers: int) -> PrefixRule | None:
    """The rule of `config`, in which all is settled; None: it freezes no prefix.

    Args:
        layers: of the model.
    """
    rule = _rule_of(config, layers)
    return rule if rule is None or config.thaw == "never" else Thawing(rule=rule, by=config.thaw)


def _rule_of(config: FreezeConfig, layers: int) -> PrefixRule | None:
    match prefix_rule(config.method):
        case "pipetransformer":
            assert config.warm_up is not None, "the warm-up is settled with the spec"
            return BOUNDED[config.rule](
                layers=layers, alpha=config.alpha, warm_up=config.warm_up, check_every=config.check_steps
            )
        case "prefix":
            return ByHand(config.schedule or ((1, config.prefix or 0),))
        case "autofreeze":
            return StablePrefix(layers)
        case _:
            return None


def first_prefix(config: FreezeConfig, layers: int) -> FrozenPrefix:
    """The prefix of a job's first step."""
    rule = rule_of(config, layers)
    return FrozenPrefix() if rule is None else rule.first()
