//! Parameters and moments in bf16: rounding, training and checkpoints.

use crate::common::*;

const NOISE: Noise<'_> = Noise { seed: 7, step: 11, name: "layers.0.weight", first_column: 0 };

const BF16: [&str; 2] = ["training.param_dtype=bf16", "optimizer.state_dtype=bf16"];

const MASTERS: &str = "optimizer.master_weights=true";

/// Numbers of both signs from 2^-100 to 2^100: arbitrary ones, bf16 values, numbers halfway between
/// two of them, and neighbours of each.
fn numbers(count: usize) -> Vec<f32> {
    let mut rng = Rng::new(3);
    let mut number = |i: usize| {
        let bits = rng.next_u64() as u32;
        let near = (bits << 16 & 0x7e_0000) as i32 + [0x1_0000, 0x1_8000][i % 2] + (bits >> 20) as i32 % 7 - 3;
        let mantissa = if i % 4 < 2 { bits & 0x7f_ffff } else { near as u32 };
        f32::from_bits((bits & 0x8000_0000) | (27 + (bits >> 8) % 200) << 23 | mantissa)
    };
    (0..count - 2).map(&mut number).chain([0.0, 1.0]).collect()
}

fn tensor<const D: usize>(values: &[f32], dims: [usize; D]) -> Tensor<Flex, D> {
    Tensor::from_data(TensorData::new(values.to_vec(), dims), &Default::default())
}

fn bits<const D: usize>(tensor: Tensor<Flex, D>) -> Vec<u16> {
    assert_eq!(tensor.dtype(), DType::BF16);
    tensor.into_data().to_vec::<bf16>().unwrap().into_iter().map(bf16::to_bits).collect()
}

#[test]
fn rounding_is_that_of_the_bits() {
    let [rows, columns, depth] = [40, 60, 10];
    let all = numbers(rows * columns * depth);
    let keys = |axis, count| NOISE.keys(axis, 0..count);
    let (first, second, third) = (keys(0, rows), keys(1, columns), keys(2, depth));
    let expected = (0..all.len()).map(|i| {
        let r = first[i / (columns * depth)] ^ second[i / depth % columns] ^ third[i % depth];
        round_stochastic(all[i], r)
    });
    assert!(bits(NOISE.round(tensor(&all, [rows, columns, depth]), 0)) == expected.collect::<Vec<_>>());

    let rounded = bits(NOISE.round(tensor(&all, [all.len()]), 0));
    let expected = all.iter().zip(keys(0, all.len())).map(|(x, r)| round_stochastic(*x, r));
    assert!(rounded == expected.collect::<Vec<_>>());
    // Both directions, about equally often.
    let away = all.iter().zip(&rounded).filter(|(x, bits)| (x.to_bits() >> 16) as u16 != **bits).count();
    let between = all.iter().filter(|x| x.to_bits() & 0xffff != 0).count();
    assert!(away > between / 3 && away < between * 2 / 3, "{away} of {between}");

    // Another step, tensor or seed has other bits.
    for other in [Noise { step: 12, ..NOISE }, Noise { name: "layers.1.weight", ..NOISE }, Noise { seed: 8, ..NOISE }] {
        assert!(bits(other.round(tensor(&all, [all.len()]), 0)) != rounded);
    }
    // A shard is rounded as the whole is.
    let whole = bits(NOISE.round(tensor(&all[..240], [30, 8]), 0));
    for rows in [0..16, 16..30, 3..4] {
        let part = tensor(&all[8 * rows.start..8 * rows.end], [rows.len(), 8]);
        assert!(bits(NOISE.round(part, rows.start)) == whole[8 * rows.start..8 * rows.end], "{rows:?}");
    }
    let odd = [f32::INFINITY, f32::NEG_INFINITY, f32::NAN, f32::MAX, 1e-40, -1e-45];
    let odd: Vec<_> =
        bits(NOISE.round(tensor(&odd, [6]), 0)).into_iter().map(|b| bf16::from_bits(b).to_f32()).collect();
    assert!(odd[0] == f32::INFINITY && odd[1] == f32::NEG_INFINITY && odd[2].is_nan(), "{odd:?}");
    assert!(odd[3] > 3.3e38 && (odd[4] - 1e-40).abs() < 1e-40 && odd[5].abs() < 1e-40, "{odd:?}");
}

/// A value a quarter of the way to the next one is rounded up in a quarter of the steps, and
/// elements are rounded independently.
#[test]
fn the_mean_of_what_is_rounded_is_the_value() {
    let (x, steps) = (1.0 + 0.25 / 128.0, 4000);
    let ups: Vec<Vec<bool>> = (0..steps)
        .map(|step| bits(Noise { step, ..NOISE }.round(tensor(&[x; 4], [2, 2]), 0)))
        .map(|bits| bits.into_iter().map(|bits| bf16::from_bits(bits).to_f32() > 1.0).collect())
        .collect();
    let share = |of: &dyn Fn(&Vec<bool>) -> bool| ups.iter().filter(|up| of(up)).count() as f64 / steps as f64;
    for i in 0..4 {
        assert!((share(&|up| up[i]) - 0.25).abs() < 0.03);
        for j in 0..i {
            assert!((share(&|up| up[i] && up[j]) - 0.0625).abs() < 0.02, "{i} {j}");
        }
    }
}

/// Decay is part of the f32 step: in bf16, 1 - 5e-4 would be 1.
#[test]
fn small_decay_is_not_lost() {
    let data = text();
    let norm = |decay: &str| {
        let settings = ["optimizer.lr=1e-4", "optimizer.warmup_steps=0", "optimizer.decay=constant", decay];
        let config = run_config(data.path(), &[&BF16[..], &settings].concat());
        let (run, _) = advance(steps(&config, &open(&config), |model| model), 20);
        let weight = run.model.layers[0].self_attn.q_proj.weight.val().cast(DType::F32);
        f64::from(values(weight.square().sum().sqrt())[0])
    };
    let ratio: f64 = norm("optimizer.weight_decay=5") / norm("optimizer.weight_decay=0");
    assert!((ratio.ln() / (-5.0 * 20.0 * 1e-4) - 1.0).abs() < 0.1, "{ratio}");
}

#[test]
fn checkpoints_are_of_the_dtype_that_tensors_are_kept_in() {
    let (data, folder) = (text(), tempfile::tempdir().unwrap());
    let saved = saved(folder.path().join("run"));
    let settings = [MASTERS, "training.steps=2", "generate.max_new_tokens=0", "model.preset=llama3-debug-moe", &saved];
    run(&run_config(data.path(), &[&BF16[..], &settings].concat())).unwrap();
    for (file, vectors) in [("model", Dtype::F32), ("optimizer", Dtype::BF16)] {
        let path = folder.path().join(format!("run/step-000000002/{file}.safetensors"));
        let bytes = std::fs::read(path).unwrap();
        for (name, tensor) in SafeTensors::deserialize(&bytes).unwrap().tensors() {
            let expected = match name.ends_with(".master") {
                _ if tensor.shape().len() < 2 => vectors,
                true => Dtype::F32,
                false => Dtype::BF16,
            };
            assert_eq!(tensor.dtype(), expected, "{name}");
        }
    }
}

#[test]
fn an_export_has_the_parameters_as_they_are() {
    let (data, folder) = (text(), tempfile::tempdir().unwrap());
    let config = run_config(data.path(), &BF16);
    let (run, _) = advance(steps(&config, &open(&config), |model| model), 1);
    for dtype in [ExportDtype::F32, ExportDtype::Bf16] {
        let to = folder.path().join(format!("{dtype:?}"));
        run.model.save_hf(&to, &ExportOptions { dtype, ..ExportOptions::default() }).unwrap();
        let read = Decoder::<Train>::load_hf(&to, &Default::default()).unwrap();
        let is_f32 = dtype == ExportDtype::F32;
        // Only norms differ: their f32 values do not fit in bf16.
        let differ = parameters(&read).iter().zip(parameters(&run.model)).filter(|(a, b)| **a != *b).count();
        assert!(if is_f32 { differ == 0 } else { differ > 0 && differ < 5 * 48 + 1 }, "{differ}");
    }
}
