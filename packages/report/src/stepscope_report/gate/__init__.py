"""The gate of `stepscope diff`: limits on changes, with a confidence interval for each."""
