"""Results that do not depend on the layout: sums in a fixed order, and checks that report what changes bits."""
