//! CUDA offline with injected faults, interpreted. Each test has its own device, identified by its
//! number of SMs.
use std::collections::BTreeMap;

use burn::backend::Flex;
use burn::tensor::ops::AttentionModuleOptions;
use burn::tensor::{DType, TensorData};
use burn_cubecl::CubeBackend;
use burn_float8::backend::Float8Backend;
use burn_float8::{Float8Config, Float8Error, Monitor, Recipe, Report, nn, report};
use burn_fusion::Fusion;
use codegen::device::{Execution, GenerateCuda, OfflineDevice, Running, execute, take_waits};
use codegen::fault::{Fault, inject};
use ptx_interpreter::{Accumulator, Rounding};
use test_data::{panic_of, relative_error};

use crate::{assert_high_precision, assert_near, assert_right, experts, layer, plain, step, step_in_bf16};

/// `burn::backend::Cuda` on another runtime.
type Offline = Fusion<CubeBackend<GenerateCuda, f32, i32, u8>>;

/// A device with few SMs and these faults. `None` without NVRTC, in which case the test prints a
/// note.
fn device<const N: usize>(sms: u16, faults: [(&'static str, Fault); N]) -> Option<(Running, OfflineDevice)> {
    let running = execute(Execution::default())?;
    let device = OfflineDevice { sm: 90, sms };
    faults.into_iter().for_each(|(kernel, fault)| inject(&device, kernel, fault));
    Some((running, device))
}

/// Checks that a linear matches the CPU despite the faults. Returns its report.
fn survives<const N: usize>(sms: u16, recipe: Recipe, faults: [(&'static str, Fault); N]) -> Option<Report> {
    let (_running, device) = device(sms, faults)?;
    let layer = layer::<Offline>(&Float8Config::new(recipe), &device).expect("the device computes");
    // Twice: in the second step the faults are known.
    assert_right::<Offline>(recipe, &layer, &device);
    assert_right::<Offline>(recipe, &layer, &device);
    Some(report(&layer))
}

/// Paths of fprop, dgrad and wgrad, without consecutive repeats.
fn paths(report: &Report) -> Vec<String> {
    let mut paths: Vec<_> =
        report.layers[0].gemms().into_iter().map(|(_, gemm)| gemm.path.clone().expect("it ran")).collect();
    paths.dedup();
    paths
}

/// Paths of the GEMMs that ran.
fn paths_that_ran(report: &Report) -> Vec<String> {
    report.layers[0].gemms().into_iter().filter_map(|(_, gemm)| gemm.path.clone()).collect()
}

fn failed(report: &Report) -> Float8Error {
    report.verify().expect_err("a kernel is wrong, or results are lost")
}

#[test]
fn a_device_that_is_right_is_asked_once() {
    let Some((_running, device)) = device(4, []) else { return };
    let layer = layer::<Offline>(&Float8Config::tensorwise(), &device).expect("the device computes");
    step::<Offline>(&layer, &device);
    take_waits();
    let x = crate::tensor::<Offline, 2>(1, [crate::SHAPE[0], crate::SHAPE[1]], &device).require_grad();
    let grads = layer.forward(x.clone()).sum().backward();
    assert_eq!(take_waits(), 0, "the host waited for the device");
    drop(grads);
    let report = report(&layer);
    report.verify().expect("all is right");
    assert_eq!(paths(&report), ["wgmma"]);
    let found = &report.self_check;
    assert!(found.kernels > 5 && found.failures.is_empty() && found.lost.is_none() && !found.off, "{found:?}");
    let text = report.to_string();
    let last = text.lines().last().expect("lines");
    assert!(last.starts_with(&format!("self-check: {} kernels, all right, ", found.kernels)), "{last}");
}

/// MX on Hopper runs at bf16's speed at best, unlike FP8. The report notes this at each GEMM.
#[test]
fn mx_on_hopper_says_what_it_costs() {
    let Some(report) = survives(5, Recipe::Mxfp8, []) else { return };
    assert_eq!(paths(&report), ["bf16 wgmma"]);
    report.verify().expect("all is right");
    let text = report.to_string();
    assert_eq!(text.matches("bf16's speed at best").count(), 3, "{text}");
    let Some(report) = survives(6, Recipe::Tensorwise, []) else { return };
    assert!(!report.to_string().contains("at best"), "{report}");
}

#[test]
fn wrong_gemms_take_the_next_path() {
    let kinds = [
        // The kernel does not compile.
        Fault::Refuse,
        // Its launches are lost, with an error message and without.
        Fault::Panic("no memory is left"),
        Fault::Drop,
        // It reads shared memory as if rows were not swizzled.
        Fault::Edit("4611686293305360384", "274877972480"),
    ];
    for (i, fault) in kinds.into_iter().enumerate() {
        let Some(report) = survives(8 + i as u16, Recipe::Tensorwise, [("gemm_hopper", fault)]) else { return };
        assert_eq!(paths(&report), ["f16 mma (self-check of wgmma failed)"], "{fault:?}");
        assert_eq!((report.totals().native, report.totals().emulated), (0, 6), "{fault:?}");
        let text = report.to_string();
        assert!(text.contains("f16 mma (self-check of wgmma failed)"), "{text}");
        let Float8Error::SelfCheck(failure) = failed(&report) else { panic!("{fault:?}") };
        assert_eq!(failure.path, "wgmma", "{failure}");
        if let Fault::Panic(message) = fault {
            assert!(failure.found.contains(message), "{failure}");
        }
    }
}

/// Buffers of `gemm_hopper`: tensor maps of A, B and the output, A's codes, the scales of A and of
/// B, the bias.
const CODES_A: usize = 0;
const SCALES_A: usize = 4;
const BIAS: usize = 6;
/// Ends of the groups, which have no bias.
const ENDS: usize = 6;

/// Faults that make single operands wrong. They are large in few elements, or small in many.
#[test]
fn wrong_operands_of_a_gemm_are_noticed() {
    let kinds: [(_, Recipe, Fault); 4] = [
        ("a dropped stage", Recipe::Tensorwise, Fault::Read(CODES_A, |codes| codes[128..160].fill(0))),
        ("a neighbour's block scale", Recipe::Blockwise, Fault::Read(SCALES_A, |scales| scales.rotate_left(4))),
        ("a wrong row map", Recipe::Tensorwise, Fault::Read(CODES_A, |codes| codes.rotate_left(codes.len() / 2))),
        ("no bias", Recipe::Tensorwise, Fault::Read(BIAS, |bias| bias.fill(0))),
    ];
    for (i, (what, recipe, fault)) in kinds.into_iter().enumerate() {
        let Some(report) = survives(50 + i as u16, recipe, [("gemm_hopper", fault)]) else { return };
        let paths = paths(&report);
        assert_eq!(paths[0], "f16 mma (self-check of wgmma failed)", "{what}: {paths:?}");
        let Float8Error::SelfCheck(failure) = failed(&report) else { panic!("{what}") };
        assert!(failure.path == "wgmma" && failure.found.contains("elements differ"), "{what}: {failure}");
    }
}

/// A GEMM of groups, which is the first for these scales.
#[test]
fn wrong_operands_of_a_grouped_gemm_are_noticed() {
    let kinds = [
        ("a dropped stage", Fault::Read(CODES_A, |codes| codes[128..160].fill(0))),
        ("no rows in the first group", Fault::Read(ENDS, |ends| ends[..4].fill(0))),
    ];
    let (want, _) = experts::<Flex>(Recipe::Rowwise, &Default::default());
    for (i, (what, fault)) in kinds.into_iter().enumerate() {
        let Some((_running, device)) = device(60 + i as u16, [("gemm_hopper", fault)]) else { return };
        let (got, report) = experts::<Offline>(Recipe::Rowwise, &device);
        assert_near(&got, &want, what, 1e-5);
        assert_eq!(paths(&report)[0], "f16 mma (self-check of wgmma failed)", "{what}");
        let mut failures = report.self_check.failures.iter();
        let is_grouped = failures.any(|failure| failure.path == "wgmma" && failure.call.contains("groups of Rows"));
        assert!(is_grouped, "{what}: {:?}", report.self_check);
    }
}

/// Tensor cores that keep fewer bits than any known ones.
#[test]
fn an_accumulator_that_loses_bits_is_noticed() {
    let Some((running, device)) = device(16, []) else { return };
    running.set_accumulator(Accumulator::Truncated { fraction_bits: 4, rounding: Rounding::ToZero });
    let layer = layer::<Offline>(&Float8Config::tensorwise(), &device).expect("the device computes");
    assert_right::<Offline>(Recipe::Tensorwise, &layer, &device);
    assert_eq!(paths(&report(&layer)), ["f16 mma (self-check of wgmma failed)"]);
}

/// The emulated path is the last one that the preflight tries.
#[test]
fn two_wrong_gemms_leave_the_third() {
    let refuse = |kernel| (kernel, Fault::Refuse);
    let two = [refuse("gemm_hopper"), refuse("gemm_half")];
    let Some(report) = survives(20, Recipe::Tensorwise, two) else { return };
    assert_eq!(paths(&report), ["emulated (self-check of wgmma, f16 mma failed)"]);
    let Some((_running, device)) = device(21, [refuse("gemm_")]) else { return };
    let error = layer::<Offline>(&Float8Config::tensorwise(), &device).expect_err("nothing multiplies");
    assert!(matches!(&error, Float8Error::Preflight { what: "GEMM", .. }), "{error:?}");
}

/// If no GEMM is left, the host computes the step that has begun, and later ones run in high
/// precision.
#[test]
fn without_a_gemm_the_host_ends_the_step() {
    for (sms, recipe) in [(22, Recipe::Tensorwise), (23, Recipe::Mxfp8)] {
        let Some((_running, device)) = device(sms, []) else { return };
        let layer = layer::<Offline>(&Float8Config::new(recipe), &device).expect("the device computes");
        // After the preflight. The emulated kernel reads codes that are not there.
        ["gemm_hopper", "gemm_half"].into_iter().for_each(|kernel| inject(&device, kernel, Fault::Refuse));
        inject(&device, "gemm_", Fault::Read(0, |codes| codes.rotate_left(codes.len() / 2)));
        assert_right::<Offline>(recipe, &layer, &device);
        let report = report(&layer);
        assert_eq!(paths(&report).len(), 1, "{report}");
        assert!(paths(&report)[0].starts_with("host (self-check of "), "{report}");
        assert!(paths(&report)[0].ends_with("emulated failed)"), "{report}");
        assert!(matches!(failed(&report), Float8Error::SelfCheck(_)));
        assert_high_precision::<Offline>(&layer, &device);
    }
}

/// Results of RMSNorm, SwiGLU, rotary positions and attention, and a gradient through all of them.
fn fused<B: Float8Backend>(device: &B::Device) -> Vec<f32> {
    let x = crate::tensor::<B, 3>(1, [2, 50, 64], device).require_grad();
    let [cos, sin] = [3, 4].map(|seed| crate::tensor::<B, 2>(seed, [50, 16], device));
    let h = nn::rms_norm(x.clone(), crate::tensor::<B, 1>(2, [64], device), 1e-5);
    let turned = nn::rotary(h.clone().reshape([2, 50, 2, 32]), cos, sin);
    let y = nn::swiglu(h, x.clone() * 0.5);
    let q = turned.clone().swap_dims(1, 2);
    let attended = nn::attention(q.clone(), q.clone(), q, None, AttentionModuleOptions::default());
    let grads = (y.clone().sum() + turned.clone().sum() + attended.clone().powf_scalar(2.0).sum()).backward();
    let values = |data: TensorData| data.to_vec::<f32>().expect("f32");
    let gradient = x.grad(&grads).expect("tracked").into_data();
    [y.inner().into_data(), turned.inner().into_data(), attended.inner().into_data(), gradient].map(values).concat()
}

/// Burn's operations replace wrong fused kernels. Correct kernels stay in use.
#[test]
fn wrong_fused_kernels_end_in_burns_operations() {
    let faults = ["rms_norm", "swiglu", "attention_"].map(|kernel| (kernel, Fault::Drop));
    let Some((_running, device)) = device(29, faults) else { return };
    let layer = layer::<Offline>(&Float8Config::tensorwise(), &device).expect("the device computes");
    let got = fused::<Offline>(&device);
    // Again, now that the wrong kernels are not launched any more.
    assert_eq!(got, fused::<Offline>(&device));
    // On CUDA Burn multiplies f32 in TF32.
    assert!(relative_error(&got, &fused::<Flex>(&Default::default())) < 1e-3);
    let report = report(&layer);
    let calls: Vec<_> = report.self_check.failures.iter().map(|failure| &failure.call).collect();
    for kernel in ["RmsNorm of", "RmsNorm backward", "SwiGlu of", "attention by tiles of"] {
        assert!(calls.iter().any(|call| call.starts_with(kernel)), "{calls:?}");
    }
    assert!(!calls.iter().any(|call| call.contains("Rotary")), "{calls:?}");
}

/// Attention in bf16 and a gradient through it.
fn attended<B: Float8Backend>(device: &B::Device) -> Vec<f32> {
    let q = crate::tensor::<B, 4>(1, [1, 2, 100, 64], device).require_grad();
    let half = q.clone().cast(DType::BF16);
    let y = nn::attention(half.clone(), half.clone(), half, None, AttentionModuleOptions::default());
    let y = y.cast(DType::F32);
    let grads = y.clone().powf_scalar(2.0).sum().backward();
    let values = |data: TensorData| data.to_vec::<f32>().expect("f32");
    [y.inner().into_data(), q.grad(&grads).expect("tracked").into_data()].map(values).concat()
}

/// Attention on warpgroups with its second operand read in the wrong order leaves the work to
/// `mma.sync`.
#[test]
fn wrong_attention_on_warpgroups_leaves_it_to_mma() {
    let fault = Fault::Edit("add, 1, 1, 1;", "add, 1, 1, 0;");
    let Some((_running, device)) = device(30, [("attention_hopper", fault)]) else { return };
    let layer = layer::<Offline>(&Float8Config::tensorwise(), &device).expect("the device computes");
    let got = attended::<Offline>(&device);
    assert!(relative_error(&got, &attended::<Flex>(&Default::default())) < 1e-2);
    let report = report(&layer);
    let calls: Vec<_> = report.self_check.failures.iter().map(|failure| &failure.call).collect();
    assert!(calls.iter().any(|call| call.starts_with("attention by wgmma of")), "{calls:?}");
    assert!(!calls.iter().any(|call| call.contains("by mma")), "{calls:?}");
}

/// Few rows have their own kernel. A wrong one leaves them to tensor cores, and does not affect
/// many rows.
#[test]
fn a_wrong_gemv_leaves_few_rows_to_tensor_cores() {
    let [m, k, _] = crate::SHAPE;
    let failed = "wgmma (self-check of gemv failed)";
    for (sms, fault, path) in [(44, None, "gemv"), (45, Some(Fault::Refuse), failed), (46, Some(Fault::Drop), failed)] {
        let Some((_running, device)) = device(sms, []) else { return };
        if let Some(fault) = fault {
            inject(&device, "gemv", fault);
        }
        let config = Float8Config::tensorwise();
        let [few, many] = [(); 2].map(|()| layer::<Offline>(&config, &device).expect("the device computes"));
        many.forward(crate::tensor::<Offline, 2>(1, [m, k], &device));
        let cpu = layer::<Flex>(&config, &Default::default()).expect("a CPU computes");
        for rows in [2, 1, 2] {
            let x = crate::tensor::<Flex, 2>(5, [rows, k], &Default::default());
            let want = cpu.forward(x).into_data().to_vec::<f32>().expect("f32");
            let y = few.forward(crate::tensor::<Offline, 2>(5, [rows, k], &device));
            let error = relative_error(&y.into_data().to_vec::<f32>().expect("f32"), &want);
            assert!(error < 1e-5, "{rows} rows on {path}: {error:e}");
        }
        let [few, many] = [few, many].map(|layer| paths_that_ran(&report(&layer)));
        assert_eq!((few, many), (vec![path.to_string()], vec!["wgmma".to_string()]));
    }
}

/// A weight gradient in high precision has a kernel for bf16. If it is wrong, Burn multiplies.
#[test]
fn a_wrong_kernel_leaves_high_precision_to_burn() {
    let recipe = Recipe::RowwiseWithGwHp;
    let (want, _) = step_in_bf16::<Flex>(recipe, &Default::default());
    // Products of contiguous rows read B as if its contraction were contiguous.
    let edit = Fault::Edit("add, 1, 1, 1, 1;", "add, 1, 1, 1, 0;");
    let failed = "burn (self-check of bf16 wgmma failed)";
    for (sms, fault, path) in [(64, None, "bf16 wgmma"), (65, Some(edit), failed)] {
        let Some((_running, device)) = device(sms, []) else { return };
        if let Some(fault) = fault {
            inject(&device, "gemm_hopper", fault);
        }
        let (got, report) = step_in_bf16::<Offline>(recipe, &device);
        assert_near(&got, &want, path, 1e-2);
        assert_eq!(paths(&report), ["wgmma", path]);
        let failures: Vec<_> = report.self_check.failures.iter().map(|failure| &*failure.path).collect();
        let expected: &[_] = if fault.is_some() { &["high precision by bf16 wgmma"] } else { &[] };
        assert_eq!(failures, expected);
        // The fault is known now.
        let (again, _) = step_in_bf16::<Offline>(recipe, &device);
        assert_near(&again, &want, path, 1e-2);
    }
}

/// Calls with few and with many rows count for their own paths.
#[test]
fn calls_count_for_their_paths() {
    let [m, k, _] = crate::SHAPE;
    let Some((_running, device)) = device(47, []) else { return };
    let layer = layer::<Offline>(&Float8Config::tensorwise(), &device).expect("the device computes");
    for rows in [2, m, m] {
        layer.forward(crate::tensor::<Offline, 2>(1, [rows, k], &device));
    }
    let calls = Monitor::new(&layer).gemm_calls();
    assert_eq!(calls, BTreeMap::from([("gemv".to_string(), 1), ("wgmma".to_string(), 2)]));
}

#[test]
fn wrong_casts_are_made_without_their_instructions() {
    let edit = Fault::Edit("cvt.rn.satfinite.e4m3x2", "cvt.rn.satfinite.e5m2x2");
    let Some(found) = survives(24, Recipe::Rowwise, [("cast_", edit)]) else { return };
    assert_eq!(paths(&found), ["wgmma"]);
    let Float8Error::SelfCheck(failure) = failed(&found) else { panic!("{found}") };
    assert!(failure.path == "casts by cvt to FP8" && failure.found.starts_with("code ["), "{failure}");
    // If every variant of the kernel is wrong, the host casts for the step that has begun, and later
    // steps run in high precision. The preflight uses another cast.
    for (sms, recipe) in [(25, Recipe::Tensorwise), (26, Recipe::Mxfp8), (27, Recipe::Delayed)] {
        let Some((_running, device)) = device(sms, [("cast_tiles", Fault::Drop)]) else { return };
        let layer = layer::<Offline>(&Float8Config::new(recipe), &device).expect("the device computes");
        assert_right::<Offline>(recipe, &layer, &device);
        assert_high_precision::<Offline>(&layer, &device);
        assert!(matches!(failed(&report(&layer)), Float8Error::SelfCheck(_)));
    }
}

/// CubeCL looks for the headers when it compiles the first kernel, in the device's thread.
#[test]
fn a_device_that_computes_nothing_is_an_error() {
    let Some((_running, device)) = device(28, [("", Fault::Panic("CUDA installation not found."))]) else { return };
    let error = layer::<Offline>(&Float8Config::tensorwise(), &device).expect_err("nothing runs");
    assert!(matches!(&error, Float8Error::Preflight { what: "cast", .. }), "{error:?}");
    assert!(error.to_string().contains("CUDA installation not found."), "{error}");
    // The same without a configuration.
    let text =
        panic_of(|| drop(plain::<Offline>(&device).forward(crate::tensor::<Offline, 2>(1, [128, 256], &device))));
    assert_eq!(text, error.to_string());
}

/// A launch that is lost after the first use ends the run at the next linear. Without another
/// linear, `verify` fails.
#[test]
fn a_launch_that_is_lost_later_is_noticed() {
    for (sms, kernel) in [(32, "gemm_hopper"), (33, "elemwise")] {
        let Some((_running, device)) = device(sms, []) else { return };
        let layer = layer::<Offline>(&Float8Config::tensorwise(), &device).expect("the device computes");
        assert_right::<Offline>(Recipe::Tensorwise, &layer, &device);
        report(&layer).verify().expect("all is right");
        inject(&device, kernel, Fault::Panic("the device is full"));
        // The launch may be lost before or after the host reaches another linear.
        let run = || drop(step::<Offline>(&layer, &device));
        let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(run));
        let Float8Error::Lost { message } = failed(&report(&layer)) else { panic!("{kernel}") };
        assert!(message.starts_with("a task of its thread has panicked: the device is full"), "{message}");
        let text = panic_of(|| drop(step::<Offline>(&layer, &device)));
        assert!(text.contains("the device is full"), "{kernel}: {ended:?} {text}");
    }
}

/// An error of an earlier launch may appear where a check waits for the device. The checked kernel
/// is not at fault.
#[test]
fn an_error_of_another_kernel_is_no_fault_of_ours() {
    let Some((_running, device)) = device(34, [("elemwise", Fault::Refuse)]) else { return };
    let layer = layer::<Offline>(&Float8Config::tensorwise(), &device).expect("the device computes");
    let x = crate::tensor::<Offline, 2>(1, [crate::SHAPE[0], crate::SHAPE[1]], &device);
    let run = || drop(layer.forward(x * 0.5 + 1.0).into_data());
    let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(run));
    let report = report(&layer);
    assert!(report.self_check.failures.is_empty(), "{report}");
    let Float8Error::Lost { message } = failed(&report) else { panic!("{ended:?}: {report}") };
    assert!(message.contains("elemwise") && message.contains("does not compile"), "{message}");
}

#[test]
fn strict_stops_at_a_kernel_that_is_wrong() {
    let Some((_running, device)) = device(36, [("gemm_hopper", Fault::Refuse)]) else { return };
    let layer = layer::<Offline>(&Float8Config::tensorwise().with_strict(true), &device);
    // The GEMM of the preflight took another path.
    let layer = layer.expect("the device computes");
    let text = panic_of(|| drop(step::<Offline>(&layer, &device)));
    assert!(text.starts_with("self-check of wgmma failed: "), "{text}");
}

#[test]
fn threads_that_use_a_kernel_at_once_wait_for_its_check() {
    let Some((_running, device)) = device(40, [("gemm_hopper", Fault::Drop)]) else { return };
    let device = &device;
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(move || {
                let layer = layer::<Offline>(&Float8Config::tensorwise(), device).expect("the device computes");
                assert_right::<Offline>(Recipe::Tensorwise, &layer, device);
            });
        }
    });
}
