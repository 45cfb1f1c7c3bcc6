"""``meshgate top``: the calls of each mesh of actors, and what each rank uses, live; it never changes the job."""
