"""The words problems are made of: common given names (never a full name), things, shop goods, places, unit pairs."""

from __future__ import annotations


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NAMES = _words(
    "Ada Amir Anna Ben Bea Carl Chloe Dan Dina Eli Emma Finn Gina Hana Hugo Ida Ivan Jack Jill Kara Kofi Lena Leo Lily "
    "Maya Max Mina Nina Noah Nora Olga Omar Otto Paul Petra Quinn Rafi Rosa Ruth Sam Sara Tara Tim Tom Uma Vera Wade "
    "Wendy Yara Yuri Zane Zoe"
)

THINGS = _words(
    "apples balls beads books boxes buttons candles cards coins cookies cups eggs flowers keys lemons marbles masks "
    "medals nuts paints pears pencils pens photos plants plates plums ribbons ropes seeds shells spoons stamps "
    "stickers stones tickets toys"
)

GOODS = _words(
    "bags balls belts books bowls brushes cakes candles caps cards clocks cups fans flags forks games hats jars kites "
    "lamps maps masks mugs notebooks pens pies plants plates posters puzzles rulers scarves shirts socks spoons "
    "stamps tapes toys"
)

# place, things kept there
STORES = (
    ("library", "books"), ("library", "maps"), ("shop", "lamps"), ("shop", "shirts"), ("shop", "toys"),
    ("farm", "eggs"), ("farm", "pumpkins"), ("farm", "sheep"), ("school", "chairs"), ("school", "notebooks"),
    ("museum", "coins"), ("museum", "stamps"), ("bakery", "cakes"), ("bakery", "rolls"), ("garden", "plants"),
    ("garden", "flowers"), ("warehouse", "boxes"), ("warehouse", "tires"), ("theater", "tickets"),
)  # fmt: skip

# big unit, small unit, small units in one big unit, subject, verb phrases "is ... long"
UNITS = (
    ("meters", "centimeters", 100, "rope", "long"),
    ("feet", "inches", 12, "ribbon", "long"),
    ("hours", "minutes", 60, "film", "long"),
    ("minutes", "seconds", 60, "song", "long"),
    ("weeks", "days", 7, "trip", "long"),
    ("days", "hours", 24, "voyage", "long"),
    ("kilometers", "meters", 1000, "trail", "long"),
    ("meters", "centimeters", 100, "wall", "wide"),
)

WORK = (
    ("pages", "reads", "read"), ("miles", "walks", "walk"), ("problems", "solves", "solve"),
    ("chairs", "paints", "paint"), ("laps", "swims", "swim"), ("letters", "writes", "write"),
    ("kilometers", "cycles", "cycle"), ("cakes", "bakes", "bake"), ("trees", "plants", "plant"),
    ("shirts", "sews", "sew"), ("lines", "types", "type"),
)  # fmt: skip

# for rates too large for one person's hands
PLANT_WORK = (
    ("lines", "prints", "print"),
    ("parts", "packs", "pack"),
    ("bolts", "makes", "make"),
    ("seeds", "sorts", "sort"),
)

CITIES = ("north", "south", "east", "west", "hill", "lake", "river", "coast")

TIMES_WORD = {2: "twice", 3: "three times", 4: "four times", 5: "five times"}
PART_WORD = {2: "half", 3: "a third", 4: "a quarter"}
