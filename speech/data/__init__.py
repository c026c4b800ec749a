"""From a data set as people have it to prepared samples with audio codes."""
