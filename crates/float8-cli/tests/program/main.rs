//! Tests of the program `float8`.

#[cfg(unix)]
mod case;
mod commands;
mod docs;
#[cfg(unix)]
mod folders;
#[cfg(all(unix, feature = "mpi"))]
mod parts;
mod profile;
#[cfg(all(unix, feature = "mpi"))]
mod ranks;
#[cfg(unix)]
mod runs;
mod support;
mod whole_way;
