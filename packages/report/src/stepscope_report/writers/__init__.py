"""Writers of reports. Each gives a step's figures to one store, and is named in `finish.report_to`."""
