"""What a Config or a Source says, in words."""


def assumed(found):
    """What is assumed, as notes say it."""
    return [each.words for each in found.assumed]
