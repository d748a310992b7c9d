"""From a captured graph to a plan: budgets, plans as data, and the planner that makes them."""
