"""Budgets for training loops of other libraries; each module needs the library it is named after."""
