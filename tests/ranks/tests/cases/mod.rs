//! Cases by name, with their numbers of ranks.
mod adapters;
mod codes;
mod collectives;
mod compare;
mod experts;
mod failed_ranks;
mod failures;
pub mod job;
mod meshes;
mod parallel;
mod parts;
mod statistics;
mod traffic;
mod training;

use std::time::Instant;

use float8_shard::{Communicator, ShardConfig};

use job::Ran;

/// Program that several ranks run together.
pub struct Case {
    pub name: &'static str,
    pub ranks: &'static [usize],
    pub run: fn(),
    /// Check of a job of this case. None if it succeeds, in a job with others.
    pub check: Option<fn(&Ran)>,
}

const fn well(name: &'static str, ranks: &'static [usize], run: fn()) -> Case {
    Case { name, ranks, run, check: None }
}

const fn alone(name: &'static str, ranks: &'static [usize], run: fn(), check: fn(&Ran)) -> Case {
    Case { name, ranks, run, check: Some(check) }
}

/// Whether collectives of devices are under test, on wgpu, which lacks bf16.
const ON_DEVICE: bool = cfg!(feature = "staged");

/// Numbers of ranks of a case in bf16.
const BF16: &[usize] = if ON_DEVICE { &[] } else { &[2, 4] };

pub const ALL: &[Case] = &[
    well("codes_are_those_of_a_cast_of_the_whole", &[2, 3, 4], codes::are_those_of_a_cast_of_the_whole),
    well("a_nan_in_the_rows_of_one_rank", &[2, 3], codes::a_nan_in_the_rows_of_one_rank),
    well("an_empty_batch_on_some_ranks", &[2, 4], codes::an_empty_batch_on_some_ranks),
    well("high_precision_is_gathered_too", &[2, 3], codes::high_precision_is_gathered_too),
    well("a_mesh_is_one_rank_for_a_small_net", &[2, 4], meshes::of_a_small_net),
    well("a_mesh_is_one_rank_for_llama", &[4], meshes::of_llama),
    well("a_mesh_is_one_rank_for_a_mixture", &[4], meshes::of_a_mixture),
    well("a_mesh_is_one_rank_for_a_tied_output", &[2], meshes::of_a_tied_output),
    well("codes_of_parallel_linears", &[2, 4], parallel::codes_are_those_of_a_cast_of_the_whole),
    well("codes_of_fp8_only_parts", &[2, 4], adapters::codes_of_fp8_only_parts),
    well("adapters_of_parts", &[2, 4], adapters::adapters_of_parts_are_those_of_the_whole),
    well("bytes_of_parallel_linears", &[2, 4], traffic::bytes_of_tokens),
    well("a_parallel_block", &[2, 4], parallel::a_block_has_the_gradients_of_one_rank),
    well("codes_of_experts", &[2, 4], experts::codes_are_those_of_all_tokens),
    well("bytes_of_experts", &[2, 4], experts::bytes_of_rows),
    well("amaxes_of_experts", &[2, 4], experts::amaxes_of_weights),
    well("a_mesh_of_experts", &[2, 4], parts::experts_train_as_on_one_rank),
    well("a_mesh_of_parts", &[4], parts::linears_train_as_on_one_rank),
    well("statistics_of_parts", &[2, 4], statistics::are_those_of_one_rank),
    well("whole_parameters_load", &[2, 4], training::whole_parameters_load),
    well("gradients_in_bf16", BF16, training::gradients_in_bf16),
    well("gradients_that_wait", &[2, 3], training::gradients_that_wait),
    well("reduce_scatters_overlap", &[2, 4], training::reduce_scatters_overlap),
    well("gathers_run_ahead", &[2], traffic::gathers_run_ahead),
    well("gathers_of_recomputation", &[2], traffic::gathers_of_recomputation),
    well("bytes_on_the_wire", &[2, 4], traffic::bytes_on_the_wire),
    well("bytes_of_replicas", &[4], traffic::bytes_of_replicas),
    well("no_nccl", &[2], failed_ranks::no_nccl),
    well("memory_of_a_rank", &[2, 4], traffic::memory_of_a_rank),
    well("models_that_differ_are_refused", &[2, 3], failures::models_that_differ),
    well("what_ranks_cannot_divide_is_refused", &[4], failures::what_ranks_cannot_divide),
    alone("muon_is_refused", &[2], failures::muon, |ran| ran.fails_with(&["up: ranks divide its weight", "Muon"])),
    alone("muon_on_parts_is_refused", &[2], failures::muon_on_parts, |ran| {
        ran.fails_with(&["up: ranks divide its weight", "Muon"])
    }),
    alone("a_record_of_another_shape_is_refused", &[2], failures::record_of_another_shape, |ran| {
        ran.fails_with(&["linear: [48, 32] was loaded", "[64, 32] and the rows of each of 2 ranks [32, 32]"])
    }),
    alone("a_matmul_with_a_shard_is_refused", &[2], failures::matmul_with_a_shard, |ran| {
        ran.fails_with(&["embedding: ranks divide its weight", "float8_shard::full_tensor"])
    }),
    alone("the_full_tensor_of_a_transpose_is_refused", &[2], failures::full_tensor_of_a_transpose, |ran| {
        ran.fails_with(&["embedding: full_tensor is of a shard [32, 40]", "not of [40, 32]"])
    }),
    alone("the_first_difference_is_named", &[2], failures::ranks_that_differ, |ran| {
        ran.fails_with(&["different collectives", "all_reduce_max_bits of \"up\"", "of \"down\""])
    }),
    alone("collectives", &[2, 3, 4], collectives::results, Ran::succeeds),
    alone("a_difference", &[4], failed_ranks::difference, failed_ranks::difference_is_named),
    alone("a_stall", &[4], failed_ranks::stall, failed_ranks::stall_is_named),
    alone("a_stall_in_a_part", &[4], failed_ranks::stall_in_a_part, failed_ranks::stall_in_a_part_is_named),
    alone("a_stall_without_exit", &[3], failed_ranks::stall_without_exit, failed_ranks::job_is_ended),
    alone("a_rank_astray", &[3], failed_ranks::astray, failed_ranks::astray_is_named),
    alone("a_killed_rank", &[4], failed_ranks::killed, |ran| ran.ends(137, &["rank 1 with PID", "signal 9"])),
    alone("a_rank_that_exits", &[4], failed_ranks::exits, |ran| ran.ends(3, &[])),
    alone("a_rank_that_panics", &[4], failed_ranks::panics, |ran| {
        ran.ends(101, &["rank 1 of 4 panicked, which ends the job:", "the model is too small"])
    }),
    alone("an_early_return", &[4], failed_ranks::early_return, failed_ranks::early_return_is_named),
    alone("a_rank_that_never_leaves", &[2], failed_ranks::never_leaves, failed_ranks::drop_has_a_limit),
    alone("a_slow_end", &[2], failed_ranks::slow_end, Ran::succeeds),
    alone("one_rank", &[1], failed_ranks::one_rank, Ran::succeeds),
    alone("an_unconfirmed_launch", &[0], failed_ranks::unconfirmed, |ran| {
        ran.fails_with(&["Launcher(\"the environment variable PMI_SIZE says 4 ranks, but MPI says 1: "])
    }),
];

/// Runs cases one after the other, on each rank of a job.
pub fn run(names: &[String]) {
    for name in names {
        let (case, begin) = (ALL.iter().find(|case| case.name == name).expect("a case"), Instant::now());
        (case.run)();
        // The runner prints the others, which may have ended their communicator.
        if case.check.is_none() && world().rank() == 0 {
            println!("test {name} on {} ranks ... ok ({:.1?})", world().world_size(), begin.elapsed());
        }
    }
}

/// Communicator of this process: MPI starts only once.
fn world() -> Communicator {
    thread_local! {
        static WORLD: Communicator = {
            #[cfg(feature = "staged")]
            float8_shard::stage_collectives();
            Communicator::from_env().unwrap()
        };
    }
    WORLD.with(Clone::clone)
}

/// Mesh of replicas, shards and parts.
fn mesh([replicate, shard, tensor]: [usize; 3]) -> ShardConfig {
    ShardConfig { replicate, shard: shard as i64, tensor, ..ShardConfig::default() }
}
