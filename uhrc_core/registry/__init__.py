"""What plugins declare and how they are found: records, hooks, rules, the catalog."""
