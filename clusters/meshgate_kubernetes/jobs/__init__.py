"""Creates, finds and deletes jobs, and finds their gateways. Never sends work to a job."""
