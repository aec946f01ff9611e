//! The cases, by name, with the numbers of ranks that they run on.
mod codes;
mod traffic;
mod training;

use burn_float8::Communicator;
use float8_comm::Options;

type Case = (&'static str, &'static [usize], fn());

pub const ALL: &[Case] = &[
    ("codes_are_those_of_a_cast_of_the_whole", &[2, 3, 4], codes::are_those_of_a_cast_of_the_whole),
    ("an_empty_batch_on_one_rank", &[2], codes::an_empty_batch_on_one_rank),
    ("two_ranks_are_one_with_accumulation", &[2], training::two_ranks_are_one_with_accumulation),
    ("four_ranks_are_close", &[4], training::four_ranks_are_close),
    ("whole_parameters_load", &[2], training::whole_parameters_load),
    ("bytes_on_the_wire", &[2, 4], traffic::bytes_on_the_wire),
    ("memory_of_a_rank", &[2, 4], traffic::memory_of_a_rank),
];

/// Of this process: MPI starts once.
fn world() -> Communicator {
    thread_local! {
        static WORLD: Communicator = Communicator::from_env(Options::default()).unwrap();
    }
    WORLD.with(Clone::clone)
}
