//! Generated tokens on the CPU: time of a token by position, for each dtype of the cache.
use std::time::Instant;

use benches::{median, table::Table};
use burn::backend::Flex;
use burn::module::AutodiffModule;
use burn::tensor::{Int, Tensor, TensorData};
use burn_float8::{Float8, Float8Config, Recipe};
use models::{Decoder, DecoderConfig, Dimensions};
use serde_json::json;
use trainer::{CacheDtype, CacheOptions, CausalLm, CausalLmExt};

type Train = Float8<burn::backend::Autodiff<Flex>>;

/// Positions to compare, and number of tokens at each.
const POSITIONS: [usize; 2] = [50, 1000];
const TOKENS: usize = 16;

fn config() -> DecoderConfig {
    let preset = DecoderConfig::preset("debug").expect("a preset");
    let dims = Dimensions {
        vocab_size: 8192,
        hidden_size: 1024,
        intermediate_size: 2816,
        num_layers: 4,
        num_heads: 16,
        num_kv_heads: 4,
        head_dim: 64,
        max_seq_len: 2048,
        ..preset.dims
    };
    DecoderConfig { dims, ..preset }
}

/// Median times of the tokens after each position.
fn measure(model: &Decoder<Float8<Flex>>, dtype: Option<CacheDtype>, repeat: u32) -> [f64; 2] {
    let device = Default::default();
    let mut cache =
        model.new_cache(&CacheOptions { dtype, positions: POSITIONS[1] + TOKENS * repeat as usize, rows_alone: false });
    let mut forward = |count: usize| {
        let ids: Vec<i32> = (0..count).map(|i| (i * 7919 % 8192) as i32).collect();
        let ids = Tensor::<Float8<Flex>, 2, Int>::from_data(TensorData::new(ids, [1, count]), &device);
        let start = Instant::now();
        model.forward_cached(ids, &mut cache).into_data();
        start.elapsed().as_secs_f64() * 1e3
    };
    let mut at = 0;
    POSITIONS.map(|position| {
        forward(position - at);
        let times: Vec<_> = (0..TOKENS).map(|_| forward(1)).collect();
        at = position + TOKENS;
        median(times)
    })
}

/// Table in f32 and in FP8.
pub fn table(repeat: u32) -> Table {
    let model = || Decoder::<Train>::new(config(), &Default::default()).expect("a valid size").init_weights(1);
    let float8 = Float8Config::new(Recipe::Rowwise).apply::<Train, _>(model()).expect("it has linears").0;
    let models = [("f32", model().valid()), ("rowwise", float8.valid())];
    let caches = [("f32", None), ("bf16", Some(CacheDtype::Bf16)), ("e4m3", Some(CacheDtype::E4m3))];
    let title = "a token of a Llama of four layers 1024 wide on the CPU, milliseconds by its position";
    let mut table = Table::new(title);
    for (precision, model) in &models {
        for (cache, dtype) in caches {
            let rounds: Vec<_> = (0..repeat.div_ceil(3)).map(|_| measure(model, dtype, repeat)).collect();
            let ratio = median(rounds.iter().map(|[early, late]| late / early).collect());
            let [early, late] = [0, 1].map(|i| median(rounds.iter().map(|round| round[i]).collect()));
            table.rows.push(json!({
                "precision": precision, "cache": cache, "position 50": early, "position 1000": late, "ratio": ratio,
            }));
        }
    }
    table
}
