//! [`model_section!`](crate::model_section): the section `[model]` of a run's configuration.

/// Defines `ModelSection`, the section `[model]`: a preset, overrides of its sizes, and further
/// keys of the model, each with its type and the field of the configuration that it overrides.
///
/// `preset(&str)` creates the configuration, which has its [`Dimensions`](crate::Dimensions) in the
/// field `dims`. Doc comments document the keys. The calling crate depends on `schemars`, `serde`
/// and `train`.
#[macro_export]
macro_rules! model_section {
    (
        $Config:ty,
        $(#[$preset:meta])*
        preset,
        $($(#[$doc:meta])* $key:ident: $Type:ty => $($field:ident).+,)*
    ) => {
        /// Model: a preset with changes, or a Hugging Face checkpoint.
        #[derive(Clone, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
        #[serde(deny_unknown_fields, default)]
        pub struct ModelSection {
            $(#[$preset])*
            pub preset: Option<String>,
            /// Folder of a Hugging Face checkpoint to start from. Its `config.json` defines the
            /// model, so only `tie_word_embeddings` of this section may be set too. With `--set`,
            /// it replaces the file's `preset`.
            pub hf_path: Option<std::path::PathBuf>,
            /// Vocabulary size, at least the tokenizer's. If absent, the preset's.
            pub vocab_size: Option<usize>,
            /// Width of the residual stream. If absent, the preset's.
            pub hidden_size: Option<usize>,
            /// Width of the SwiGLU. If absent, the preset's.
            pub intermediate_size: Option<usize>,
            /// Number of decoder layers. If absent, the preset's.
            pub num_layers: Option<usize>,
            /// Number of query heads. If absent, the preset's.
            pub num_heads: Option<usize>,
            /// Number of key and value heads; must divide `num_heads`. If absent, the preset's.
            pub num_kv_heads: Option<usize>,
            /// Width of one head; must be even. If absent, the preset's.
            pub head_dim: Option<usize>,
            /// Added to the mean square in RMSNorm. If absent, the preset's.
            pub rms_norm_eps: Option<f64>,
            /// Base of the rotary frequencies. If absent, the preset's.
            pub rope_theta: Option<f64>,
            /// Number of positions. `training.seq_len`, and prompt and sample together, may not be
            /// longer. If absent, the preset's.
            pub max_seq_len: Option<usize>,
            /// Whether the output layer is the transposed embedding. If absent, the preset's or the
            /// checkpoint's. With `hf_path`, it also selects the output layer of a tied checkpoint
            /// that has a separate one: `false` uses it, `true` drops it.
            pub tie_word_embeddings: Option<bool>,
            $($(#[$doc])* pub $key: Option<$Type>,)*
        }

        impl train::ModelSection for ModelSection {
            type Config = $Config;

            fn of_folder(hf_path: Option<std::path::PathBuf>, tie_word_embeddings: Option<bool>) -> Self {
                Self { hf_path, tie_word_embeddings, ..Self::default() }
            }

            fn preset(&self) -> &str {
                self.preset.as_deref().unwrap_or("debug")
            }

            fn hf_path(&self) -> Option<&std::path::Path> {
                self.hf_path.as_deref()
            }

            fn tie_word_embeddings(&self) -> Option<bool> {
                self.tie_word_embeddings
            }

            fn to_config(&self) -> Result<$Config, train::JobError> {
                let mut config = <$Config>::preset(self.preset())?;
                let dims = &mut config.dims;
                $crate::set(&mut dims.vocab_size, self.vocab_size);
                $crate::set(&mut dims.hidden_size, self.hidden_size);
                $crate::set(&mut dims.intermediate_size, self.intermediate_size);
                $crate::set(&mut dims.num_layers, self.num_layers);
                $crate::set(&mut dims.num_heads, self.num_heads);
                $crate::set(&mut dims.num_kv_heads, self.num_kv_heads);
                $crate::set(&mut dims.head_dim, self.head_dim);
                $crate::set(&mut dims.rms_norm_eps, self.rms_norm_eps);
                $crate::set(&mut dims.rope_theta, self.rope_theta);
                $crate::set(&mut dims.max_seq_len, self.max_seq_len);
                $crate::set(&mut dims.tie_word_embeddings, self.tie_word_embeddings);
                $(config.$($field).+ = self.$key.or(config.$($field).+);)*
                Ok(config)
            }
        }
    };
}

/// Sets a field if there is a value.
pub fn set<T>(field: &mut T, value: Option<T>) {
    if let Some(value) = value {
        *field = value;
    }
}
