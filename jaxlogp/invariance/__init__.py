"""Results that do not depend on the layout: sums in a fixed order, and checks and reports of what changes bits."""
