"""Short common words for the prompts of the task families."""


def words(text: str) -> tuple[str, ...]:
    """Return the words of a text."""
    return tuple(text.split())


FIRST_NAMES = words(
    "Adam Alice Anna Ben Carla Clara Dan David Diana Ella Emma Eric Eva Frank Grace Hanna Henry Ida Ivan Jack "
    "James Jane John Julia Karl Kate Laura Leo Lisa Lucy Maria Mark Martin Mia Nina Noah Olga Oscar Paul Peter "
    "Rita Robert Rosa Sam Sara Simon Sofia Thomas Tina Victor"
)

CITIES = words(
    "Athens Berlin Bern Boston Bristol Cairo Chicago Cork Dallas Delhi Denver Dublin Geneva Hamburg Kyoto Leeds "
    "Lima Lisbon London Lyon Madrid Miami Milan Munich Naples Nice Oslo Oxford Paris Porto Prague Quito Riga "
    "Rome Seoul Sydney Tokyo Toronto Turin Vienna Warsaw York Zurich"
)

GOODS = words(
    "bread butter cheese chicken chocolate coffee corn cotton cream fish flour fruit garlic glass glue honey ink "
    "jam juice leather lemonade meat milk oil paint paper pasta pepper rice salt sand silk soap soup sugar tea "
    "timber water wax wine wool yarn"
)
"""Uncountable nouns: "the rice is late"."""

THINGS = words(
    "apples bags balls beads bells bikes books bottles bowls boxes brushes buttons cakes candles cards chairs "
    "clocks coins cups dolls eggs forks hats jars kegs kites lamps lemons maps melons mugs nails onions oranges "
    "pears pencils pens plates plums pots rings ropes shells shirts spoons stamps tents toys"
)
"""Countable nouns in the plural: "12 apples"."""

COLOURS = words("black blue brown gold green grey orange pink purple red silver tan teal white yellow")

DAYS = words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")

MONTHS = words("January February March April May June July August September October November December")

TEAMS = words("art data design finance health law media music office press sales sport stock supply tax")

VISITS = words("bank clinic dentist doctor garage lawyer library museum school studio tailor vet")

JOBS = words(
    "baker barber builder butcher chef clerk coach cook dancer dentist doctor driver farmer gardener guard judge "
    "lawyer nurse painter pilot plumber poet sailor singer tailor teacher vet waiter writer"
)
