//! Cases by name, with their numbers of ranks.
mod adapters;
mod codes;
mod compare;
mod experts;
mod experts_model;
mod failures;
mod mesh;
mod parallel;
mod parallel_model;
mod statistics;
mod traffic;
mod training;

use std::time::Instant;

use float8_shard::Communicator;

/// Program that several ranks run together.
pub struct Case {
    pub name: &'static str,
    pub ranks: &'static [usize],
    pub run: fn(),
    /// None if it succeeds.
    pub failure: Option<Failure>,
}

/// Expected failure of a job.
pub struct Failure {
    /// Parts of its error.
    pub words: &'static [&'static str],
    /// `FLOAT8_COMM_TIMEOUT`, in seconds.
    pub timeout: &'static str,
}

const fn well(name: &'static str, ranks: &'static [usize], run: fn()) -> Case {
    Case { name, ranks, run, failure: None }
}

const fn fails(name: &'static str, ranks: &'static [usize], run: fn(), words: &'static [&'static str]) -> Case {
    Case { name, ranks, run, failure: Some(Failure { words, timeout: "20" }) }
}

/// Numbers of ranks of a case in bf16, which wgpu lacks.
const BF16: &[usize] = if cfg!(feature = "staged") { &[] } else { &[2, 4] };

pub const ALL: &[Case] = &[
    well("codes_are_those_of_a_cast_of_the_whole", &[2, 3, 4], codes::are_those_of_a_cast_of_the_whole),
    well("a_nan_in_the_rows_of_one_rank", &[2, 3], codes::a_nan_in_the_rows_of_one_rank),
    well("any_number_of_rows", &[2, 3], codes::any_number_of_rows),
    well("an_empty_batch_on_some_ranks", &[2, 4], codes::an_empty_batch_on_some_ranks),
    well("high_precision_is_gathered_too", &[2, 3], codes::high_precision_is_gathered_too),
    well("a_mesh_is_one_rank_for_a_small_net", &[2, 4], mesh::of_a_small_net),
    well("a_mesh_is_one_rank_for_llama", &[4], mesh::of_llama),
    well("a_mesh_is_one_rank_for_a_mixture", &[4], mesh::of_a_mixture),
    well("a_mesh_is_one_rank_for_a_tied_output", &[2], mesh::of_a_tied_output),
    well("gradients_of_a_mesh", &[4], mesh::has_the_gradients_of_one_rank),
    well("a_mesh_of_another_size_is_refused", &[4], mesh::of_another_size_is_refused),
    well("codes_of_parallel_linears", &[2, 4], parallel::codes_are_those_of_a_cast_of_the_whole),
    well("codes_of_fp8_only_parts", &[2, 4], adapters::codes_of_fp8_only_parts),
    well("adapters_of_parts", &[2, 4], adapters::adapters_of_parts_are_those_of_the_whole),
    well("bytes_of_parallel_linears", &[2, 4], parallel::bytes_of_tokens),
    well("parallel_plans_that_are_refused", &[2], parallel::plans_that_are_refused),
    well("a_parallel_block", &[2, 4], parallel::a_block_has_the_gradients_of_one_rank),
    well("codes_of_experts", &[2, 4], experts::codes_are_those_of_all_tokens),
    well("bytes_of_experts", &[2, 4], experts::bytes_of_rows),
    well("amaxes_of_experts", &[2, 4], experts::amaxes_of_weights),
    well("experts_of_a_decoder", &[2, 4], experts_model::have_the_gradients_of_one_rank),
    well("a_mesh_of_experts_trains", &[2, 4], experts_model::train_as_on_one_rank),
    well("experts_that_are_refused", &[2], experts_model::that_are_refused),
    well("gradients_of_a_mesh_of_parts", &[4], parallel_model::has_the_gradients_of_one_rank),
    well("a_mesh_of_parts_trains", &[4], parallel_model::trains_as_on_one_rank),
    well("a_mesh_of_other_parts_is_refused", &[4], parallel_model::of_other_parts_is_refused),
    well("statistics_of_parts", &[2, 4], statistics::are_those_of_one_rank),
    well("whole_parameters_load", &[2, 4], training::whole_parameters_load),
    well("gradients_in_bf16", BF16, training::gradients_in_bf16),
    well("gradients_that_wait", &[2, 3], training::gradients_that_wait),
    well("reduce_scatters_overlap", &[2, 4], training::reduce_scatters_overlap),
    well("gathers_run_ahead", &[2], traffic::gathers_run_ahead),
    well("gathers_of_recomputation", &[2], traffic::gathers_of_recomputation),
    well("bytes_on_the_wire", &[2, 4], traffic::bytes_on_the_wire),
    well("memory_of_a_rank", &[2, 4], traffic::memory_of_a_rank),
    well("models_that_differ_are_refused", &[2], failures::models_that_differ_are_refused),
    well("ranks_that_would_part_are_refused", &[2, 3], failures::ranks_that_would_part_are_refused),
    well("what_cannot_be_sharded_is_refused", &[2], failures::what_cannot_be_sharded_is_refused),
    fails("muon_is_refused", &[2], failures::muon, &["up: its weight is sharded", "Muon"]),
    fails(
        "a_record_of_another_shape_is_refused",
        &[2],
        failures::record_of_another_shape,
        &["linear: [48, 32] was loaded", "[64, 32] and the rows of each of 2 ranks [32, 32]"],
    ),
    fails(
        "a_step_of_one_rank_alone_is_named",
        &[2],
        failures::a_step_of_one_rank_alone,
        &["ranks are in different collectives: rank 0 is in", "rank 1 in"],
    ),
    fails(
        "a_matmul_with_a_shard_is_refused",
        &[2],
        failures::matmul_with_a_shard,
        &["embedding: its weight is sharded", "float8_shard::full_tensor"],
    ),
    fails(
        "the_full_tensor_of_a_transpose_is_refused",
        &[2],
        failures::full_tensor_of_a_transpose,
        &["embedding: full_tensor is of a shard [32, 40]", "not of [40, 32]"],
    ),
    Case {
        name: "a_rank_that_sleeps_is_named",
        ranks: &[3],
        run: failures::a_rank_that_sleeps,
        failure: Some(Failure {
            words: &["all_reduce_max_bits of \"linear\"", "has not ended after", "rank 1 has not arrived"],
            timeout: "2",
        }),
    },
    fails(
        "the_first_difference_is_named",
        &[2],
        failures::ranks_that_differ,
        &["different collectives", "of \"up\"", "of \"down\""],
    ),
];

/// Runs cases one after the other, on each rank of a job.
pub fn run(names: &[String]) {
    for name in names {
        let (case, begin) = (ALL.iter().find(|case| case.name == name).expect("a case"), Instant::now());
        (case.run)();
        let (comm, seconds) = (world(), begin.elapsed().as_secs_f64());
        if comm.rank() == 0 {
            println!("test {name} on {} ranks ... ok ({seconds:.1} s)", comm.world_size());
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
